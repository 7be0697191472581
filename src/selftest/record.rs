//! The self-test record: a small file for each GPU in the user's cache folder. It is valid for the same GPU, driver, version of kiln and
//! kernels. Any other contents count as no record.

use crate::backend::cuda::{Cuda, driver_release};
use crate::error::{Error, Result};
use crate::files;
use crate::output;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Most bytes of a record.
const LIMIT: u64 = 4096;

/// What a record is valid for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The GPU.
    pub uuid: [u8; 16],
    /// Release of the driver, if it tells, and the CUDA version that it supports.
    pub driver: String,
    /// Version of kiln.
    pub kiln: String,
    /// A hash of the kernel images.
    pub images: u64,
}

impl Key {
    /// The key of an open GPU.
    pub fn of(cuda: &Cuda) -> Self {
        let device = cuda.device();
        let release = driver_release().unwrap_or_default();
        Self {
            uuid: device.uuid,
            driver: format!("{release} CUDA {}.{}", device.driver.0, device.driver.1).trim_start().to_owned(),
            kiln: env!("CARGO_PKG_VERSION").into(),
            images: cuda.fingerprint(),
        }
    }

    fn uuid(&self) -> String {
        self.uuid.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The recorded result of a self-test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Verdict {
    /// The self-test has begun and not ended. A record that still says so at the next start means that the GPU hung or the process was
    /// killed.
    Begun,
    /// All checks passed.
    Passed,
    /// The first failure.
    Failed(String),
}

/// The contents of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    gpu: String,
    driver: String,
    kiln: String,
    images: String,
    verdict: Verdict,
}

impl Record {
    fn new(key: &Key, verdict: Verdict) -> Self {
        let Key { driver, kiln, images, .. } = key.clone();
        Self { gpu: key.uuid(), driver, kiln, images: format!("{images:016x}"), verdict }
    }
}

/// The folder of records. `None` if the user has no cache folder.
#[derive(Clone, Debug, Default)]
pub struct Records(Option<PathBuf>);

impl Records {
    /// The folder of records in a cache folder.
    pub fn below(caches: Option<&Path>) -> Self {
        Self(caches.map(|caches| caches.join("kiln")))
    }

    /// The record file of a GPU.
    pub fn path(&self, key: &Key) -> Option<PathBuf> {
        self.0.as_ref().map(|folder| folder.join(format!("selftest-{}.json", key.uuid())))
    }

    /// The recorded verdict for this key.
    pub fn find(&self, key: &Key) -> Option<Verdict> {
        let bytes = files::read(&self.path(key)?, LIMIT).ok()?;
        let found: Record = serde_json::from_slice(&bytes).ok()?;
        let Record { gpu, driver, kiln, images, .. } = Record::new(key, Verdict::Begun);
        let valid = (&found.gpu, &found.driver, &found.kiln, &found.images) == (&gpu, &driver, &kiln, &images);
        valid.then_some(found.verdict)
    }

    /// Removes the record of a GPU, if there is one.
    pub fn remove(&self, key: &Key) {
        if let Some(path) = self.path(key) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Records a verdict in place of the previous one. If that fails, the only cost is time: the self-test runs again.
    pub fn save(&self, key: &Key, verdict: Verdict) -> Result<()> {
        let Some(path) = self.path(key) else { return Ok(()) };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|source| Error::Write { path: folder.into(), source })?;
        }
        let bytes = serde_json::to_vec(&Record::new(key, verdict)).map_err(|e| Error::Op { op: "json", what: e.to_string() })?;
        output::save_new(&path, &bytes, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn key() -> Key {
        Key { uuid: [0xab; 16], driver: "580.82.07 CUDA 13.0".into(), kiln: "1.2.3".into(), images: 7 }
    }

    /// A temporary folder.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("kiln-record-{name}-{}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_record_counts_for_the_same_gpu_driver_version_and_kernels() {
        let folder = Folder::new("key");
        let records = Records::below(Some(&folder.0));
        assert_eq!(records.find(&key()), None);
        for verdict in [Verdict::Begun, Verdict::Failed("mma nvf4: \"x\"\n".into()), Verdict::Passed] {
            records.save(&key(), verdict.clone()).unwrap();
            assert_eq!(records.find(&key()), Some(verdict));
        }
        for other in [
            Key { uuid: [0xac; 16], ..key() },
            Key { driver: "581.0 CUDA 13.0".into(), ..key() },
            Key { kiln: "1.2.4".into(), ..key() },
            Key { images: 8, ..key() },
        ] {
            assert_eq!(records.find(&other), None, "{other:?}");
        }
        records.remove(&key());
        assert_eq!(records.find(&key()), None);
        records.save(&key(), Verdict::Passed).unwrap();
        // The file of another GPU under this one's name.
        let (from, to) = (records.path(&key()).unwrap(), records.path(&Key { uuid: [1; 16], ..key() }).unwrap());
        fs::copy(from, to).unwrap();
        assert_eq!(records.find(&Key { uuid: [1; 16], ..key() }), None);
    }

    #[test]
    fn damaged_and_foreign_files_count_as_none() {
        let folder = Folder::new("damaged");
        let records = Records::below(Some(&folder.0));
        records.save(&key(), Verdict::Passed).unwrap();
        let path = records.path(&key()).unwrap();
        let whole = fs::read(&path).unwrap();
        for bytes in [
            Vec::new(),
            whole[..whole.len() - 1].to_vec(),
            b"null".to_vec(),
            b"{}".to_vec(),
            String::from_utf8(whole.clone()).unwrap().replace("\"passed\"", "\"maybe\"").into_bytes(),
            String::from_utf8(whole.clone()).unwrap().replace("{\"gpu\"", "{\"more\":1,\"gpu\"").into_bytes(),
            [whole.clone(), vec![b' '; LIMIT as usize]].concat(),
            vec![0xff; 64],
        ] {
            fs::write(&path, &bytes).unwrap();
            assert_eq!(records.find(&key()), None, "{}", String::from_utf8_lossy(&bytes));
        }
        // A folder in place of the file; then the record is written again.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(records.find(&key()), None);
        assert!(records.save(&key(), Verdict::Passed).is_err());
        fs::remove_dir(&path).unwrap();
        fs::write(&path, "damaged").unwrap();
        records.save(&key(), Verdict::Passed).unwrap();
        assert_eq!(records.find(&key()), Some(Verdict::Passed));
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_told_and_no_folder_is_fine() {
        let folder = Folder::new("unwritable");
        let file = folder.0.join("file");
        fs::write(&file, "").unwrap();
        // No user can make a folder below a file.
        let records = Records::below(Some(&file));
        assert!(records.save(&key(), Verdict::Passed).is_err());
        assert_eq!(records.find(&key()), None);
        assert!(Records::below(None).save(&key(), Verdict::Passed).is_ok());
        assert_eq!(Records::below(None).find(&key()), None);
    }
}
