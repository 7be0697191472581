//! Requests that may come again: with the idempotency key that the client gave them, or with a seed, which makes a request a pure function.
//! A twin of a request that is read or runs joins it. With a key, the answer is kept for a while, for a client that never got it.

use super::body::Digest;
use super::work::Work;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Limit on the bytes of kept answers, on their number, and how long they are kept.
const BYTES: usize = 256 << 20;
const ANSWERS: usize = 64;
const TIME: Duration = Duration::from_secs(600);

/// The requests that may come again.
#[derive(Clone, Default)]
pub struct Retries(Arc<Mutex<VecDeque<Entry>>>);

struct Entry {
    at: Instant,
    key: Digest,
    content: Digest,
    state: State,
}

/// How far a request is. Only its clients keep it alive while it runs.
enum State {
    /// It is read. Twins wait until the sender is gone.
    Claimed(watch::Receiver<()>),
    Running(Weak<Work>),
    Done(Arc<Work>),
}

impl State {
    /// Whether a twin has something to join.
    fn is_live(&self) -> bool {
        match self {
            Self::Claimed(_) => true,
            Self::Running(work) => work.upgrade().is_some_and(|work| !work.has_failed()),
            Self::Done(work) => !work.has_failed(),
        }
    }

    /// Bytes that are held here and nowhere else.
    fn bytes(&self) -> usize {
        if let Self::Done(work) = self { work.bytes() } else { 0 }
    }
}

/// What a request finds.
pub enum Found {
    /// It is new, and twins now wait for it.
    New(Claim),
    /// A twin is read. When the receiver has news, it is time to look again.
    Wait(watch::Receiver<()>),
    /// A twin runs, or is done.
    Same(Arc<Work>),
    /// The key belongs to a request with other content.
    Other,
}

/// The place of a request that is read. Dropping it lets its twins go on alone.
pub struct Claim {
    retries: Retries,
    key: Digest,
    _twins: watch::Sender<()>,
}

impl Retries {
    fn all(&self) -> MutexGuard<'_, VecDeque<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks for a twin, and takes the key if there is none.
    pub fn find(&self, key: Digest, content: Digest) -> Found {
        let mut all = self.all();
        forget(&mut all, Instant::now());
        match all.iter().find(|entry| entry.key == key) {
            Some(entry) if entry.content != content => return Found::Other,
            Some(Entry { state: State::Claimed(twin), .. }) => return Found::Wait(twin.clone()),
            Some(Entry { state: State::Done(work), .. }) => return Found::Same(work.clone()),
            Some(Entry { state: State::Running(work), .. }) => {
                if let Some(work) = work.upgrade() {
                    return Found::Same(work);
                }
            }
            None => {}
        }
        let (twins, receiver) = watch::channel(());
        all.retain(|entry| entry.key != key);
        all.push_back(Entry { at: Instant::now(), key, content, state: State::Claimed(receiver) });
        Found::New(Claim { retries: self.clone(), key, _twins: twins })
    }

    /// Keeps the answer of a request.
    pub fn keep(&self, key: &Digest, work: &Arc<Work>) {
        let mut all = self.all();
        if let Some(entry) = all.iter_mut().find(|entry| entry.key == *key) {
            entry.state = State::Done(work.clone());
        }
        forget(&mut all, Instant::now());
    }

    /// The bytes of kept answers.
    pub fn bytes(&self) -> u64 {
        self.all().iter().map(|entry| entry.state.bytes() as u64).sum()
    }
}

impl Claim {
    /// Lets twins join a request that was admitted.
    pub fn share(self, work: &Arc<Work>) {
        let mut all = self.retries.all();
        // A small image may be done already.
        let own = all.iter_mut().find(|entry| entry.key == self.key && matches!(entry.state, State::Claimed(_)));
        if let Some(entry) = own {
            entry.state = State::Running(Arc::downgrade(work));
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let is_own = |entry: &Entry| entry.key == self.key && matches!(entry.state, State::Claimed(_));
        self.retries.all().retain(|entry| !is_own(entry));
    }
}

/// Drops what failed, what is too old, and the oldest answers if there are too many.
fn forget(all: &mut VecDeque<Entry>, now: Instant) {
    all.retain(|entry| entry.state.is_live() && now.saturating_duration_since(entry.at) <= TIME);
    let is_done = |entry: &Entry| matches!(entry.state, State::Done(_));
    while all.iter().filter(|entry| is_done(entry)).count() > ANSWERS
        || all.iter().map(|entry| entry.state.bytes()).sum::<usize>() > BYTES
    {
        let Some(oldest) = all.iter().position(is_done) else { return };
        all.remove(oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twins_wait_for_who_came_first() {
        let retries = Retries::default();
        let Found::New(claim) = retries.find([1; 32], [1; 32]) else { panic!("new") };
        let Found::Wait(mut twin) = retries.find([1; 32], [1; 32]) else { panic!("a twin") };
        assert!(matches!(retries.find([1; 32], [2; 32]), Found::Other));
        assert!(matches!(retries.find([2; 32], [1; 32]), Found::New(_)));
        // The first one was refused, so its twin goes on alone.
        drop(claim);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert!(runtime.block_on(twin.changed()).is_err());
        assert!(matches!(retries.find([1; 32], [2; 32]), Found::New(_)));
        assert!(retries.all().is_empty());
        assert_eq!(retries.bytes(), 0);
    }
}
