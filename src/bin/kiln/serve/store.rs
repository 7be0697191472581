//! Finished images that a client will ask for once more: by the URL in an answer, or by repeating a request with its idempotency key. They
//! are in memory only. Nothing here answers a request that has no key and no URL.

use super::body::Digest;
use super::work::{Made, Work};
use std::collections::{HashMap, VecDeque};
use std::fmt::Write;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Limit on the bytes of images with a URL, and how long a URL works.
const URL_BYTES: usize = 256 << 20;
const URL_TIME: Duration = Duration::from_secs(3600);

/// Limit on the bytes of answers to repeated requests, on their number, and how long an idempotency key works.
const RETRY_BYTES: usize = 256 << 20;
const RETRIES: usize = 64;
const RETRY_TIME: Duration = Duration::from_secs(600);

/// Images with a URL, and answers to repeated requests.
#[derive(Default)]
pub struct Store {
    urls: HashMap<String, Arc<Made>>,
    /// The ids in the order in which they were given out.
    order: VecDeque<(Instant, String)>,
    url_bytes: usize,
    retries: VecDeque<Retry>,
}

/// A request that may be repeated.
struct Retry {
    at: Instant,
    key: Digest,
    body: Digest,
    work: Kept,
}

/// The work of a request: kept alive by its clients while it runs, and here once it is done.
enum Kept {
    Running(Weak<Work>),
    Done(Arc<Work>),
}

impl Kept {
    fn get(&self) -> Option<Arc<Work>> {
        match self {
            Self::Running(work) => work.upgrade(),
            Self::Done(work) => Some(work.clone()),
        }
    }

    /// Bytes that are held here and nowhere else.
    fn bytes(&self) -> usize {
        match self {
            Self::Running(_) => 0,
            Self::Done(work) => work.bytes(),
        }
    }
}

/// What is known of a request that may be a repeated one.
pub enum Repeated {
    /// It is new.
    No,
    /// It is the same request, which runs or is done.
    Same(Arc<Work>),
    /// Its key belongs to another request.
    Other,
}

impl Store {
    /// Keeps an image, and returns the id of its URL: 128 random bits, which are its permission.
    pub fn add_url(&mut self, made: Arc<Made>, random: [u8; 16]) -> String {
        let mut id = String::new();
        for byte in random {
            let _ = write!(id, "{byte:02x}");
        }
        self.url_bytes += made.file.len();
        self.urls.insert(id.clone(), made);
        self.order.push_back((Instant::now(), id.clone()));
        self.forget(Instant::now());
        id
    }

    /// The image with this id.
    pub fn image(&mut self, id: &str) -> Option<Arc<Made>> {
        self.forget(Instant::now());
        self.urls.get(id).cloned()
    }

    /// Looks for an earlier request with this key.
    pub fn repeated(&mut self, key: &Digest, body: &Digest) -> Repeated {
        self.forget(Instant::now());
        let Some(retry) = self.retries.iter().find(|retry| retry.key == *key) else { return Repeated::No };
        match retry.work.get() {
            Some(work) if !work.has_failed() => match retry.body == *body {
                true => Repeated::Same(work),
                false => Repeated::Other,
            },
            // It failed, or its client has left: the next try starts again.
            _ => Repeated::No,
        }
    }

    /// Remembers a request that may be repeated.
    pub fn add_retry(&mut self, key: Digest, body: Digest, work: &Arc<Work>) {
        self.retries.retain(|retry| retry.key != key);
        self.retries.push_back(Retry { at: Instant::now(), key, body, work: Kept::Running(Arc::downgrade(work)) });
        self.forget(Instant::now());
    }

    /// Keeps the answer of a request that may be repeated, once it is done.
    pub fn finish_retry(&mut self, key: &Digest, work: &Arc<Work>) {
        if let Some(retry) = self.retries.iter_mut().find(|retry| retry.key == *key) {
            retry.work = Kept::Done(work.clone());
        }
        self.forget(Instant::now());
    }

    /// Drops what is too old, and the oldest of what is too much.
    fn forget(&mut self, now: Instant) {
        let is_old = |at: Instant, most: Duration| now.saturating_duration_since(at) > most;
        while let Some((at, _)) = self.order.front()
            && (is_old(*at, URL_TIME) || self.url_bytes > URL_BYTES)
            && let Some((_, id)) = self.order.pop_front()
        {
            self.url_bytes -= self.urls.remove(&id).map_or(0, |made| made.file.len());
        }
        self.retries.retain(|retry| !is_old(retry.at, RETRY_TIME) && retry.work.get().is_some());
        while self.retries.len() > RETRIES || self.retry_bytes() > RETRY_BYTES {
            self.retries.pop_front();
        }
    }

    fn retry_bytes(&self) -> usize {
        self.retries.iter().map(|retry| retry.work.bytes()).sum()
    }

    /// The bytes that are kept, by why.
    pub fn bytes(&self) -> [(&'static str, u64); 2] {
        [("urls", self.url_bytes as u64), ("retries", self.retry_bytes() as u64)]
    }
}
