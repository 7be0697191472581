//! Finished images that a client asks for by the URL in an answer. They are in memory only.

use super::work::Made;
use std::collections::{HashMap, VecDeque};
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limit on the bytes of all images, and how long a URL works.
const BYTES: usize = 256 << 20;
const TIME: Duration = Duration::from_secs(3600);

/// Images with a URL.
#[derive(Default)]
pub struct Store {
    images: HashMap<String, Arc<Made>>,
    /// The ids in the order in which they were given out.
    order: VecDeque<(Instant, String)>,
    bytes: usize,
}

impl Store {
    /// Keeps an image, and returns the id of its URL: 128 random bits, which are its permission.
    pub fn add(&mut self, made: Arc<Made>, random: [u8; 16]) -> String {
        let mut id = String::new();
        for byte in random {
            let _ = write!(id, "{byte:02x}");
        }
        self.bytes += made.file.len();
        self.images.insert(id.clone(), made);
        self.order.push_back((Instant::now(), id.clone()));
        self.forget(Instant::now());
        id
    }

    /// The image with this id.
    pub fn image(&mut self, id: &str) -> Option<Arc<Made>> {
        self.forget(Instant::now());
        self.images.get(id).cloned()
    }

    /// Drops what is too old, and the oldest of what is too much.
    fn forget(&mut self, now: Instant) {
        while let Some((at, _)) = self.order.front()
            && (now.saturating_duration_since(*at) > TIME || self.bytes > BYTES)
            && let Some((_, id)) = self.order.pop_front()
        {
            self.bytes -= self.images.remove(&id).map_or(0, |made| made.file.len());
        }
    }

    /// The bytes of all images.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }
}
