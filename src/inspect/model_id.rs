//! The identity of a model's weights, from samples of them: whether two runs used the same model, in milliseconds.
//!
//! Names and shapes do not tell a fine-tuned model from its base. Hashing whole files would, but takes as long as reading them.
//! Every tensor of another training differs at its ends, too.

use crate::checkpoint::{Shard, Weights};
use crate::component::{Component, PerComponent};
use crate::error::{Error, Result};
use crate::files;
use crate::locate::{Found, ModelFiles};
use crate::pipeline::OpenModel;
use crate::tiny;
use crate::trace;
use sha2::{Digest, Sha256};
use std::path::Path;

/// Bytes at each end of a tensor that are part of the identity.
const SAMPLE: usize = 4096;

/// Limit on the size of a tokenizer file and of a `kiln.json`. Larger ones are refused when the model is opened.
const MAX_FILE: u64 = 64 << 20;

/// What a model's identity follows from. It holds no copy of the weights, and outlives the [`OpenModel`]: another thread may compute
/// the identity while the model is loaded.
#[derive(Clone, Debug)]
pub struct ModelSamples {
    shards: PerComponent<Vec<Shard>>,
    /// The content of the tokenizer file; empty if the tokenizer is part of the program.
    tokenizer: Vec<u8>,
    /// The content of `kiln.json`; empty if there is none.
    settings: Vec<u8>,
}

impl ModelSamples {
    /// The samples of a model that was found and opened.
    pub fn new(found: &Found, model: &OpenModel) -> Result<Self> {
        let shards = model.weights().each_ref().map(|weights: &Weights| weights.shards().to_vec());
        let (tokenizer, settings) = match found {
            Found::Files(files) => of_files(files)?,
            Found::BuiltIn(model) => (model.tokenizer_file()?.to_vec(), model.defaults_file()?.to_vec()),
            Found::Tiny => (tiny::TOKENIZER.to_vec(), Vec::new()),
        };
        Ok(Self { shards, tokenizer, settings })
    }

    /// The identity: `k1:` and 16 hexadecimal digits. Fails if a file has changed since it was opened.
    ///
    /// The digits are the first of a SHA-256. For the transformer, the text encoder and the VAE, and for each tensor in order of its
    /// name, it covers `name\0dtype\0shape\n`, as in the header, with the shape as `1,2,3`, then the first and last 4,096 bytes of the
    /// tensor. All bytes of a tensor count if it has at most 8,192. The SHA-256 of the tokenizer file and the bytes of `kiln.json`
    /// come last.
    pub fn id(&self) -> Result<String> {
        let _span = trace::span("identify the model");
        let mut hash = Sha256::new();
        for part in Component::ALL {
            let shards = &self.shards[part];
            let mut tensors: Vec<_> =
                shards.iter().flat_map(|shard| shard.tensors().map(move |tensor| (tensor, shard))).collect();
            tensors.sort_by_key(|((name, _), _)| *name);
            for ((name, entry), shard) in tensors {
                let shape: Vec<String> = entry.shape.iter().map(usize::to_string).collect();
                hash.update(format!("{name}\0{}\0{}\n", entry.dtype.name, shape.join(",")));
                let data = &shard.contents()[entry.range.clone()];
                if data.len() <= 2 * SAMPLE {
                    hash.update(data);
                } else {
                    hash.update(&data[..SAMPLE]);
                    hash.update(&data[data.len() - SAMPLE..]);
                }
            }
        }
        // A file that was cut meanwhile reads as zeros.
        self.shards.values().flatten().try_for_each(Shard::verify)?;
        hash.update(Sha256::digest(&self.tokenizer));
        hash.update(&self.settings);
        let digits: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Ok(format!("k1:{digits}"))
    }
}

/// The contents of a model's tokenizer file and of its `kiln.json`.
fn of_files(model: &ModelFiles) -> Result<(Vec<u8>, Vec<u8>)> {
    let read = |path: Option<&Path>| match path {
        Some(path) => files::read(path, MAX_FILE).map_err(|error| Error::read(path, error)),
        None => Ok(Vec::new()),
    };
    Ok((read(model.tokenizer.as_deref())?, read(model.defaults.path.as_deref())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Bytes;
    use std::sync::Arc;

    /// Tensors of bytes in one file.
    fn shard(tensors: &[(&str, &str, &[u8])]) -> Shard {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, dtype, bytes) in tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            header.insert((*name).into(), serde_json::json!({"dtype": dtype, "shape": [bytes.len()], "data_offsets": offsets}));
            data.extend_from_slice(bytes);
        }
        let header = serde_json::Value::from(header).to_string();
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        Shard::from_bytes("test", Bytes::new(Arc::new(file))).unwrap()
    }

    fn samples(transformer: Vec<Shard>) -> ModelSamples {
        let other = |name| vec![shard(&[(name, "U8", &[1, 2, 3])])];
        let shards = PerComponent { transformer, text_encoder: other("t"), vae: other("v") };
        ModelSamples { shards, tokenizer: b"{}".to_vec(), settings: b"{\"width\": 64}".to_vec() }
    }

    fn long() -> Vec<u8> {
        (0..10_000_u32).map(|i| (i * i % 251) as u8).collect()
    }

    #[test]
    fn the_identity_is_as_specified() {
        // Computed by other code, in Python with hashlib.
        let one = samples(vec![shard(&[("b", "U8", &long()), ("a", "I8", &[7; 8192])])]);
        assert_eq!(one.id().unwrap(), "k1:0db17323491c12df");
        // However the tensors are divided among files.
        let two = samples(vec![shard(&[("b", "U8", &long())]), shard(&[("a", "I8", &[7; 8192])])]);
        assert_eq!(two.id().unwrap(), one.id().unwrap());
    }

    #[test]
    fn each_end_of_each_tensor_counts() {
        let changed = |at: usize| {
            let mut bytes = long();
            bytes[at] ^= 1;
            samples(vec![shard(&[("a", "U8", &bytes)])]).id().unwrap()
        };
        let plain = samples(vec![shard(&[("a", "U8", &long())])]);
        let id = plain.id().unwrap();
        for at in [0, SAMPLE - 1, 10_000 - SAMPLE, 9_999] {
            assert_ne!(changed(at), id, "byte {at}");
        }
        // What lies between the samples is not read.
        for at in [SAMPLE, 10_000 - SAMPLE - 1] {
            assert_eq!(changed(at), id, "byte {at}");
        }
        let other = |name, dtype| samples(vec![shard(&[(name, dtype, &long())])]).id().unwrap();
        let settings = ModelSamples { settings: Vec::new(), ..plain.clone() };
        let tokenizer = ModelSamples { tokenizer: Vec::new(), ..plain.clone() };
        let PerComponent { transformer, text_encoder, vae } = plain.shards.clone();
        let swapped = ModelSamples { shards: PerComponent { transformer, text_encoder: vae, vae: text_encoder }, ..plain };
        let others = [other("b", "U8"), other("a", "I8"), settings.id().unwrap(), tokenizer.id().unwrap(), swapped.id().unwrap()];
        others.iter().for_each(|other| assert_ne!(*other, id));
    }
}
