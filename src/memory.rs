//! How much memory there still is, and who can do without it.
//!
//! The first is asked before a job: whoever starts a picture that cannot fit waits for minutes, and then the system ends the
//! process, or another one. What is free is what all of these leave: the machine, the groups of processes that this one is in, and
//! its own limit on addresses. What the system keeps of files counts as free, because it is given up for anything better; so do
//! mapped weights. In doubt there is more rather than less: a job that would have fitted must not be refused.
//!
//! The second is for an allocator that ends the process where there is no memory left. It cannot see who asks, and some are
//! ready for a no: these say so with [`fallible`].

use std::cell::Cell;
use std::path::{Path, PathBuf};

/// What to do where there is too little.
pub const HINT: &str = "lower --width and --height, close other programs, or allow this one more memory";

thread_local! {
    // Neither lazy nor dropped, and so fit to be asked by an allocator.
    static FALLIBLE: Cell<bool> = const { Cell::new(false) };
}

/// Does what can do without the memory that it asks for.
pub fn fallible<R>(work: impl FnOnce() -> R) -> R {
    let before = FALLIBLE.replace(true);
    let result = work();
    FALLIBLE.set(before);
    result
}

/// Whether this thread is in [`fallible`].
pub fn is_fallible() -> bool {
    FALLIBLE.get()
}

/// Whether so many bytes can be had at this moment, by asking for them.
pub fn can_allocate(bytes: usize) -> bool {
    let mut memory = Vec::<u8>::new();
    let answer = fallible(|| memory.try_reserve_exact(bytes));
    // Somebody might look at it: otherwise it need not be asked for at all.
    std::hint::black_box(&memory);
    answer.is_ok()
}

/// Bytes that this process can still have, as far as the system tells.
pub fn available() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let folders = cgroup_folders(&read("/proc/self/cgroup"));
    let cgroups: Vec<Cgroup> = folders.iter().filter_map(|(version, folder)| Cgroup::read(*version, folder)).collect();
    free(&read("/proc/meminfo"), &cgroups, address_limit(), &read("/proc/self/status"))
}

/// This process's limit on addresses, if there is one.
pub fn address_limit() -> Option<u64> {
    #[cfg(target_os = "linux")]
    return rustix::process::getrlimit(rustix::process::Resource::As).current;
    #[cfg(not(target_os = "linux"))]
    None
}

/// What all limits leave: the texts are those of `/proc/meminfo` and `/proc/self/status`.
fn free(meminfo: &str, cgroups: &[Cgroup], address_limit: Option<u64>, status: &str) -> Option<u64> {
    // None at all is said by systems that do not know.
    let machine = kilobytes(meminfo, "MemAvailable:").filter(|&bytes| bytes > 0);
    let cgroups = cgroups.iter().filter_map(Cgroup::free);
    // What does not fit goes to swap, if slowly.
    let swap = kilobytes(meminfo, "SwapFree:").unwrap_or(0);
    let memory = machine.into_iter().chain(cgroups).min().map(|bytes| bytes.saturating_add(swap));
    let addresses = address_limit.zip(kilobytes(status, "VmSize:")).map(|(limit, used)| limit.saturating_sub(used));
    memory.into_iter().chain(addresses).min()
}

/// A line `Key:  123 kB`, in bytes.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024))
}

/// The two ways in which Linux tells of groups of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// Folders that tell of the groups a process is in, by the text of its `/proc/self/cgroup`: its own group and all above it. In a
/// container some may not be there, and the last, which always is, stands for the container.
fn cgroup_folders(text: &str) -> Vec<(Version, PathBuf)> {
    let mut found = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (version, root) = match controllers {
            "" => (Version::V2, Path::new("/sys/fs/cgroup")),
            list if list.split(',').any(|name| name == "memory") => (Version::V1, Path::new("/sys/fs/cgroup/memory")),
            _ => continue,
        };
        let path = Path::new(path.trim_start_matches('/'));
        found.extend(path.ancestors().map(|group| (version, root.join(group))));
    }
    found
}

/// What a group of processes may use, and does.
struct Cgroup {
    /// The text of the limit; none is a word, or a number beyond all memory.
    limit: String,
    usage: String,
    /// What it is used for.
    stat: String,
    version: Version,
}

impl Cgroup {
    fn read(version: Version, folder: &Path) -> Option<Self> {
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let (limit, usage) = match version {
            Version::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            Version::V2 => ("memory.max", "memory.current"),
        };
        Some(Self { limit: read(limit)?, usage: read(usage)?, stat: read("memory.stat").unwrap_or_default(), version })
    }

    /// What it may still use.
    fn free(&self) -> Option<u64> {
        let number = |text: &str| text.trim().parse::<u64>().ok();
        let files = match self.version {
            // Of groups below it as well, as the usage is.
            Version::V1 => ["total_inactive_file ", "total_active_file "],
            Version::V2 => ["inactive_file ", "active_file "],
        };
        let reclaimable = files.iter().filter_map(|key| self.stat.lines().find_map(|line| number(line.strip_prefix(key)?)));
        let used = number(&self.usage)?.saturating_sub(reclaimable.sum());
        Some(number(&self.limit)?.saturating_sub(used))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str =
        "MemTotal:       32000000 kB\nMemFree:          100000 kB\nMemAvailable:    2000000 kB\nSwapFree:              0 kB\n";
    const STATUS: &str = "Name:\tkiln\nVmPeak:\t  999999 kB\nVmSize:\t  100000 kB\n";

    fn cgroup(version: Version, limit: &str, usage: &str, stat: &str) -> Cgroup {
        Cgroup { limit: limit.into(), usage: usage.into(), stat: stat.into(), version }
    }

    #[test]
    fn the_tightest_limit_counts() {
        let kb = 1024;
        let small = || cgroup(Version::V2, "1000000\n", "400000\n", "anon 300000\nfile 100000\n");
        for (groups, addresses, want) in [
            (vec![], None, 2_000_000 * kb),
            (vec![], Some(1_000_000 * kb), 900_000 * kb),
            (vec![], Some(50_000 * kb), 0),
            (vec![], Some(u64::MAX), 2_000_000 * kb),
            (vec![small()], None, 600_000),
            (vec![cgroup(Version::V2, "max\n", "400000\n", ""), small()], Some(1_000_000 * kb), 600_000),
            // Version 1 has no word for no limit.
            (vec![cgroup(Version::V1, "9223372036854771712\n", "5\n", "")], None, 2_000_000 * kb),
        ] {
            assert_eq!(free(MEMINFO, &groups, addresses, STATUS), Some(want), "{addresses:?}");
        }
        assert_eq!(free("", &[], None, ""), None, "a system that tells nothing");
        assert_eq!(free("MemAvailable: 0 kB\n", &[], Some(7), ""), None);
        let swapping = MEMINFO.replace("SwapFree:              0", "SwapFree:              8");
        assert_eq!(free(&swapping, &[small()], None, STATUS), Some(600_000 + 8 * kb), "swap is memory, too");
    }

    #[test]
    fn files_in_memory_are_free() {
        let stat = "anon 100\nfile 850\nshmem 50\ninactive_file 500\nactive_file 300\n";
        assert_eq!(cgroup(Version::V2, "1000", "1000", stat).free(), Some(800));
        let stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 500\ntotal_active_file 300\n";
        assert_eq!(cgroup(Version::V1, "1000", "1000", stat).free(), Some(800));
        assert_eq!(cgroup(Version::V2, "1000", "2000", "").free(), Some(0), "a limit that was lowered");
        assert_eq!(cgroup(Version::V2, "max", "2000", "").free(), None);
        assert_eq!(cgroup(Version::V2, "", "nonsense", "inactive_file x").free(), None);
    }

    #[test]
    fn every_group_above_counts() {
        let paths = |text| {
            cgroup_folders(text).into_iter().map(|(version, path)| (version, path.display().to_string())).collect::<Vec<_>>()
        };
        let at = |version, path: &str| (version, path.to_owned());
        assert_eq!(
            paths("0::/user.slice/a\n"),
            [
                at(Version::V2, "/sys/fs/cgroup/user.slice/a"),
                at(Version::V2, "/sys/fs/cgroup/user.slice"),
                at(Version::V2, "/sys/fs/cgroup/"),
            ]
        );
        assert_eq!(
            paths("9:name=systemd:/x\n4:cpu,memory:/docker/7:8\n"),
            [
                at(Version::V1, "/sys/fs/cgroup/memory/docker/7:8"),
                at(Version::V1, "/sys/fs/cgroup/memory/docker"),
                at(Version::V1, "/sys/fs/cgroup/memory/"),
            ]
        );
        assert_eq!(paths(""), []);
        assert_eq!(paths("nonsense\n::\n1:memory\n"), [at(Version::V2, "/sys/fs/cgroup/")]);
    }

    #[test]
    fn this_machine_tells() {
        if cfg!(target_os = "linux") {
            assert!(available().is_some_and(|bytes| bytes > 1 << 20));
        }
    }

    #[test]
    fn room_is_asked_for() {
        assert!(can_allocate(1 << 20) && !can_allocate(isize::MAX as usize) && !can_allocate(usize::MAX));
    }

    #[test]
    fn whoever_can_do_without_says_so() {
        assert!(!is_fallible());
        assert!(fallible(|| fallible(is_fallible) && is_fallible()), "until the outer one is over");
        assert!(!is_fallible());
    }
}
