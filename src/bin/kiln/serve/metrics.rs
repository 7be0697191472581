//! Counters and histograms in Prometheus' text format. No label holds a prompt, a key or an address.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Upper bounds of the histograms' buckets, in seconds.
const BOUNDS: [f64; 12] = [0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 15.0, 60.0, 240.0];

/// What the server counts.
#[derive(Default)]
pub struct Metrics {
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    images: Mutex<BTreeMap<&'static str, u64>>,
    canceled: Mutex<BTreeMap<&'static str, u64>>,
    ignored: AtomicU64,
    queue_seconds: Histogram,
    image_seconds: Histogram,
    stage_seconds: Mutex<BTreeMap<&'static str, Histogram>>,
}

/// Numbers that are read when somebody asks.
pub struct Gauges {
    pub queue_length: usize,
    pub queue_seconds: f64,
    pub connections: usize,
    /// Bytes that are held, by what holds them.
    pub host_bytes: Vec<(&'static str, u64)>,
    /// Free bytes of the device, if it tells.
    pub device_free: Option<u64>,
    pub version: &'static str,
    pub backend: String,
}

#[derive(Default)]
struct Histogram {
    inner: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    buckets: [u64; BOUNDS.len()],
    count: u64,
    sum: f64,
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Histogram {
    fn observe(&self, seconds: f64) {
        let mut counts = locked(&self.inner);
        for (bucket, bound) in counts.buckets.iter_mut().zip(BOUNDS) {
            *bucket += u64::from(seconds <= bound);
        }
        counts.count += 1;
        counts.sum += seconds;
    }

    /// Writes the rows. `labels` stand before the bound, each with a comma after it.
    fn write(&self, out: &mut String, name: &str, labels: &str) {
        let Counts { buckets, count, sum } = &*locked(&self.inner);
        for (bound, bucket) in BOUNDS.iter().zip(buckets) {
            let _ = writeln!(out, "{name}_bucket{{{labels}le=\"{bound}\"}} {bucket}");
        }
        let _ = writeln!(out, "{name}_bucket{{{labels}le=\"+Inf\"}} {count}");
        let labels = labels.strip_suffix(',').map_or(String::new(), |labels| format!("{{{labels}}}"));
        let _ = writeln!(out, "{name}_sum{labels} {sum}\n{name}_count{labels} {count}");
    }
}

impl Metrics {
    pub fn count_request(&self, route: &'static str, status: u16) {
        *locked(&self.requests).entry((route, status)).or_default() += 1;
    }

    /// Counts an image that is done, failed or canceled.
    pub fn count_image(&self, result: &'static str) {
        *locked(&self.images).entry(result).or_default() += 1;
    }

    /// Counts a request whose client left, while it waited or while it ran.
    pub fn count_canceled(&self, when: &'static str) {
        *locked(&self.canceled).entry(when).or_default() += 1;
    }

    /// Counts fields that no one knows.
    pub fn count_ignored(&self, fields: usize) {
        self.ignored.fetch_add(fields as u64, Ordering::Relaxed);
    }

    /// Adds the time that an image has waited.
    pub fn add_queue_time(&self, seconds: f64) {
        self.queue_seconds.observe(seconds);
    }

    /// Adds the time that an image took from its turn to its file.
    pub fn add_image_time(&self, seconds: f64) {
        self.image_seconds.observe(seconds);
    }

    /// Adds the time of a stage of an image.
    pub fn add_stage_time(&self, stage: &'static str, seconds: f64) {
        locked(&self.stage_seconds).entry(stage).or_default().observe(seconds);
    }

    /// All numbers as text.
    pub fn text(&self, gauges: &Gauges) -> String {
        let mut out = String::new();
        let head = |out: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        };
        head(&mut out, "kiln_build_info", "gauge", "The program; always 1.");
        let _ = writeln!(out, "kiln_build_info{{version=\"{}\",backend=\"{}\"}} 1", gauges.version, gauges.backend);
        head(&mut out, "kiln_requests_total", "counter", "Requests by route and status.");
        for ((route, status), count) in &*locked(&self.requests) {
            let _ = writeln!(out, "kiln_requests_total{{route=\"{route}\",status=\"{status}\"}} {count}");
        }
        head(&mut out, "kiln_images_total", "counter", "Images by result.");
        for (result, count) in &*locked(&self.images) {
            let _ = writeln!(out, "kiln_images_total{{result=\"{result}\"}} {count}");
        }
        head(&mut out, "kiln_canceled_total", "counter", "Requests whose client left.");
        for (when, count) in &*locked(&self.canceled) {
            let _ = writeln!(out, "kiln_canceled_total{{when=\"{when}\"}} {count}");
        }
        head(&mut out, "kiln_ignored_fields_total", "counter", "Fields of requests that are not known.");
        let _ = writeln!(out, "kiln_ignored_fields_total {}", self.ignored.load(Ordering::Relaxed));
        for (name, value, help) in [
            ("kiln_queue_length", gauges.queue_length as f64, "Images that wait."),
            ("kiln_queue_predicted_seconds", gauges.queue_seconds, "Predicted seconds of all images that wait or run."),
            ("kiln_connections", gauges.connections as f64, "Open connections."),
        ] {
            head(&mut out, name, "gauge", help);
            let _ = writeln!(out, "{name} {value}");
        }
        head(&mut out, "kiln_host_bytes", "gauge", "Bytes of host memory that requests and answers hold.");
        for (kind, bytes) in &gauges.host_bytes {
            let _ = writeln!(out, "kiln_host_bytes{{kind=\"{kind}\"}} {bytes}");
        }
        if let Some(free) = gauges.device_free {
            head(&mut out, "kiln_device_bytes", "gauge", "Bytes of device memory, after the last image.");
            let _ = writeln!(out, "kiln_device_bytes{{kind=\"free\"}} {free}");
        }
        head(&mut out, "kiln_queue_seconds", "histogram", "Seconds that images waited.");
        self.queue_seconds.write(&mut out, "kiln_queue_seconds", "");
        head(&mut out, "kiln_image_seconds", "histogram", "Seconds from an image's turn to its encoded file.");
        self.image_seconds.write(&mut out, "kiln_image_seconds", "");
        head(&mut out, "kiln_stage_seconds", "histogram", "Seconds of each stage of an image.");
        for (stage, histogram) in &*locked(&self.stage_seconds) {
            histogram.write(&mut out, "kiln_stage_seconds", &format!("stage=\"{stage}\","));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_prometheus() {
        let metrics = Metrics::default();
        metrics.count_request("edits", 200);
        metrics.count_request("edits", 200);
        metrics.add_queue_time(0.3);
        metrics.add_queue_time(1000.0);
        metrics.add_stage_time("denoise", 0.05);
        let gauges = Gauges {
            queue_length: 3,
            queue_seconds: 1.5,
            connections: 2,
            host_bytes: vec![("uploads", 7)],
            device_free: Some(9),
            version: "1",
            backend: "cpu".into(),
        };
        let text = metrics.text(&gauges);
        for line in [
            "kiln_requests_total{route=\"edits\",status=\"200\"} 2",
            "kiln_queue_length 3",
            "kiln_queue_predicted_seconds 1.5",
            "kiln_host_bytes{kind=\"uploads\"} 7",
            "kiln_device_bytes{kind=\"free\"} 9",
            "kiln_queue_seconds_bucket{le=\"0.2\"} 0",
            "kiln_queue_seconds_bucket{le=\"0.4\"} 1",
            "kiln_queue_seconds_bucket{le=\"+Inf\"} 2",
            "kiln_queue_seconds_sum 1000.3",
            "kiln_stage_seconds_bucket{stage=\"denoise\",le=\"0.05\"} 1",
            "kiln_stage_seconds_count{stage=\"denoise\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        let names = |line: &str| line.split(['{', ' ']).next().unwrap().to_owned();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = names(line);
            let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
            assert!(text.contains(&format!("# TYPE {family} ")), "{line}");
        }
    }
}
