//! Available memory, and a marker for allocations that may fail.
//!
//! kiln checks available memory before a job. An image that does not fit would run for minutes until the system's OOM killer ends
//! this process, or another one. Available memory is the minimum over the machine, this process's cgroups and its limit on
//! address space. The page cache counts as available, because the system reclaims it; so do mapped weights. In doubt the estimate
//! is too high: a job that would have fitted must not be rejected.
//!
//! The marker is for the program's allocator, which exits the process when memory is exhausted. The allocator cannot know which
//! callers can handle a failed allocation. They declare it with [`fallible`].

use std::cell::Cell;
use std::path::{Path, PathBuf};

thread_local! {
    // Neither lazily initialized nor dropped, so that an allocator can read it at any time.
    static FALLIBLE: Cell<bool> = const { Cell::new(false) };
}

/// Runs code that can handle failed allocations.
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

/// Tries whether an allocation of this size succeeds now.
pub(crate) fn can_allocate(bytes: usize) -> bool {
    let mut memory = Vec::<u8>::new();
    let answer = fallible(|| memory.try_reserve_exact(bytes));
    // Keeps the compiler from removing the allocation.
    std::hint::black_box(&memory);
    answer.is_ok()
}

/// Bytes that this process can still allocate, if the system shows it.
pub fn available() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let folders = cgroup_folders(&read("/proc/self/cgroup"));
    let cgroups: Vec<Cgroup> = folders.iter().filter_map(|(version, folder)| Cgroup::read(*version, folder)).collect();
    free(&read("/proc/meminfo"), &cgroups, address_limit(), &read("/proc/self/status"))
}

/// The limit on the address space of this process, if there is one.
pub fn address_limit() -> Option<u64> {
    #[cfg(target_os = "linux")]
    return rustix::process::getrlimit(rustix::process::Resource::As).current;
    #[cfg(not(target_os = "linux"))]
    None
}

/// Memory that is free under all limits. `meminfo` and `status` are the texts of `/proc/meminfo` and `/proc/self/status`.
fn free(meminfo: &str, cgroups: &[Cgroup], address_limit: Option<u64>, status: &str) -> Option<u64> {
    // Systems without this number report zero.
    let machine = kilobytes(meminfo, "MemAvailable:").filter(|&bytes| bytes > 0);
    let cgroups = cgroups.iter().filter_map(Cgroup::free);
    // Beyond free RAM, memory can be swapped out, if slowly.
    let swap = kilobytes(meminfo, "SwapFree:").unwrap_or(0);
    let memory = machine.into_iter().chain(cgroups).min().map(|bytes| bytes.saturating_add(swap));
    let addresses = address_limit.zip(kilobytes(status, "VmSize:")).map(|(limit, used)| limit.saturating_sub(used));
    memory.into_iter().chain(addresses).min()
}

/// The value of a line `Key:  123 kB`, in bytes.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024))
}

/// The versions of Linux cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// The cgroup folders of a process, from the text of its `/proc/self/cgroup`: its own cgroup and all ancestors. In a container
/// some may not exist. The last one always does: it is the container's.
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

/// The memory limit and usage of a cgroup.
struct Cgroup {
    /// The text of the limit. Without a limit it is a word, or a number larger than any memory.
    limit: String,
    usage: String,
    /// The text of the usage statistics.
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

    /// Bytes that the cgroup may still use.
    fn free(&self) -> Option<u64> {
        let number = |text: &str| text.trim().parse::<u64>().ok();
        let files = match self.version {
            // The totals include descendants, as does the usage.
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
            // Version 1 writes a large number for no limit.
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
    fn the_page_cache_counts_as_free() {
        let stat = "anon 100\nfile 850\nshmem 50\ninactive_file 500\nactive_file 300\n";
        assert_eq!(cgroup(Version::V2, "1000", "1000", stat).free(), Some(800));
        let stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 500\ntotal_active_file 300\n";
        assert_eq!(cgroup(Version::V1, "1000", "1000", stat).free(), Some(800));
        assert_eq!(cgroup(Version::V2, "1000", "2000", "").free(), Some(0), "a limit that was lowered");
        assert_eq!(cgroup(Version::V2, "max", "2000", "").free(), None);
        assert_eq!(cgroup(Version::V2, "", "nonsense", "inactive_file x").free(), None);
    }

    #[test]
    fn all_ancestor_cgroups_count() {
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
    fn linux_reports_available_memory() {
        if cfg!(target_os = "linux") {
            assert!(available().is_some_and(|bytes| bytes > 1 << 20));
        }
    }

    #[test]
    fn impossible_allocations_fail() {
        assert!(can_allocate(1 << 20) && !can_allocate(isize::MAX as usize) && !can_allocate(usize::MAX));
    }

    #[test]
    fn fallible_scopes_nest() {
        assert!(!is_fallible());
        assert!(fallible(|| fallible(is_fallible) && is_fallible()), "until the outer one is over");
        assert!(!is_fallible());
    }
}
