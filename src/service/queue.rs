//! A queue that shares one engine fairly: the next task is of the caller who has had the least of it.
//!
//! Each caller has a virtual time, which grows by the seconds of its tasks. Whoever was idle starts where the others are, so idleness saves
//! nothing up. The tasks of a caller keep their order.
//!
//! Whoever comes later may overtake a task, but not for ever: a task that has waited for nearly twice as long as was predicted when it came
//! is the next.

use super::locked;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Condvar, Mutex, PoisonError};

/// How many callers are remembered.
const MOST: usize = 1000;

/// How much longer than predicted a task may wait while others overtake it. Less would leave little of fairness; with twice, predictions
/// would be off by more than a factor of two.
const PATIENCE: f64 = 1.8;

/// Tasks of many callers, for one thread that takes them.
pub struct FairQueue<T> {
    queues: Mutex<Queues<T>>,
    /// Notified when a task comes or the queue closes.
    news: Condvar,
}

/// The tasks and the state of all callers.
struct Queues<T> {
    callers: BTreeMap<String, Caller<T>>,
    /// The virtual time of the caller who was served last.
    now: f64,
    /// The seconds of all tasks that were taken out.
    served: f64,
    /// How many tasks have come, which decides between callers of one time.
    count: u64,
    closed: bool,
}

/// A caller who has tasks, or who has had more than the others.
struct Caller<T> {
    time: f64,
    waiting: VecDeque<Waiting<T>>,
}

struct Waiting<T> {
    number: u64,
    seconds: f64,
    /// Nobody overtakes the task any more once tasks of this many seconds were taken out.
    due: f64,
    task: T,
}

impl<T> FairQueue<T> {
    pub fn new() -> Self {
        let queues = Queues { callers: BTreeMap::new(), now: 0.0, served: 0.0, count: 0, closed: false };
        Self { queues: Mutex::new(queues), news: Condvar::new() }
    }

    /// Adds a task that is predicted to take this long. A closed queue drops it.
    pub fn push(&self, caller: &str, seconds: f64, task: T) {
        let mut queues = locked(&self.queues);
        if !queues.closed {
            let due = queues.served + PATIENCE * queues.ahead(caller).1;
            queues.push(caller, seconds, due, task);
            self.news.notify_one();
        }
    }

    /// Waits for a task, and takes it out. `None` if the queue is closed and empty. A task that `is_live` refuses is not counted as the
    /// caller's.
    pub fn pop(&self, is_live: impl Fn(&T) -> bool) -> Option<T> {
        let mut queues = locked(&self.queues);
        if queues.is_empty() {
            // The last task is done and nobody waits, so nobody has had too much.
            queues.callers.clear();
        }
        let is_idle = |queues: &mut Queues<T>| !queues.closed && queues.is_empty();
        let mut queues = self.news.wait_while(queues, is_idle).unwrap_or_else(PoisonError::into_inner);
        queues.take(is_live).map(|next| next.task)
    }

    /// How many tasks wait.
    pub fn len(&self) -> usize {
        locked(&self.queues).callers.values().map(|caller| caller.waiting.len()).sum()
    }

    /// How many tasks of a caller wait.
    pub fn len_of(&self, caller: &str) -> usize {
        locked(&self.queues).callers.get(caller).map_or(0, |caller| caller.waiting.len())
    }

    /// The predicted seconds of all tasks that wait.
    pub fn seconds(&self) -> f64 {
        let queues = locked(&self.queues);
        queues.callers.values().flat_map(|caller| &caller.waiting).map(|waiting| waiting.seconds).sum()
    }

    /// Drops the tasks that a condition refuses. They do not count as their callers'.
    pub fn retain(&self, keep: impl Fn(&T) -> bool) {
        self.retain_waiting(|waiting| keep(&waiting.task));
    }

    /// Keeps the tasks that come out within this many predicted seconds, and drops the others.
    pub fn keep_first(&self, seconds: f64) {
        let mut queues = locked(&self.queues).without_tasks();
        let (mut sum, mut kept) = (0.0, BTreeSet::new());
        while let Some(Waiting { number, seconds: own, .. }) = queues.take(|()| true) {
            sum += own;
            if sum <= seconds {
                kept.insert(number);
            }
        }
        self.retain_waiting(|waiting| kept.contains(&waiting.number));
    }

    fn retain_waiting(&self, keep: impl Fn(&Waiting<T>) -> bool) {
        let mut dropped = Vec::new();
        for caller in locked(&self.queues).callers.values_mut() {
            if !caller.waiting.iter().all(&keep) {
                let (kept, gone) = caller.waiting.drain(..).partition(&keep);
                caller.waiting = kept;
                dropped.extend::<VecDeque<_>>(gone);
            }
        }
        // Outside of the lock, because dropping a task may wake its caller.
        drop(dropped);
    }

    /// How many tasks come before a task that this caller adds now, if no other comes, and their predicted seconds. The task that runs is not
    /// counted.
    pub fn ahead(&self, caller: &str) -> (usize, f64) {
        locked(&self.queues).ahead(caller)
    }

    /// Takes no more tasks. Those that wait are still handed out.
    pub fn close(&self) {
        locked(&self.queues).closed = true;
        self.news.notify_all();
    }

    /// Closes the queue and drops what waits.
    pub fn clear(&self) {
        self.close();
        let callers = std::mem::take(&mut locked(&self.queues).callers);
        // Outside of the lock, because dropping a task may wake its caller.
        drop(callers);
    }
}

impl<T> Queues<T> {
    /// Whether no task waits.
    fn is_empty(&self) -> bool {
        self.callers.values().all(|caller| caller.waiting.is_empty())
    }

    /// Forgets callers who are idle and have had no more than the others, and all idle ones if there are too many.
    fn forget(&mut self) {
        let (now, many) = (self.now, self.callers.len() > MOST);
        self.callers.retain(|_, caller| !caller.waiting.is_empty() || (caller.time > now && !many));
    }

    fn push(&mut self, caller: &str, seconds: f64, due: f64, task: T) {
        let (now, number) = (self.now, self.count);
        self.count += 1;
        let own = self.callers.entry(caller.into()).or_insert(Caller { time: now, waiting: VecDeque::new() });
        if own.waiting.is_empty() {
            own.time = own.time.max(now);
        }
        own.waiting.push_back(Waiting { number, seconds, due, task });
    }

    /// Takes the next task out.
    fn take(&mut self, is_live: impl Fn(&T) -> bool) -> Option<Waiting<T>> {
        let name = self.next()?.to_owned();
        let own = self.callers.get_mut(&name)?;
        let (before, next) = (own.time, own.waiting.pop_front()?);
        if is_live(&next.task) {
            own.time += next.seconds;
            self.served += next.seconds;
        }
        self.now = self.now.max(before);
        self.forget();
        Some(next)
    }

    /// These queues without what is in them, for predictions.
    fn without_tasks(&self) -> Queues<()> {
        let waiting = |of: &Waiting<T>| Waiting { number: of.number, seconds: of.seconds, due: of.due, task: () };
        let caller = |of: &Caller<T>| Caller { time: of.time, waiting: of.waiting.iter().map(waiting).collect() };
        let callers = self.callers.iter().map(|(name, of)| (name.clone(), caller(of))).collect();
        Queues { callers, now: self.now, served: self.served, count: self.count, closed: self.closed }
    }

    /// See [`FairQueue::ahead`].
    fn ahead(&self, caller: &str) -> (usize, f64) {
        let mut queues = self.without_tasks();
        let own = queues.count;
        queues.push(caller, 0.0, f64::INFINITY, ());
        let mut ahead = (0, 0.0);
        while let Some(Waiting { seconds, .. }) = queues.take(|()| true).filter(|next| next.number != own) {
            ahead = (ahead.0 + 1, ahead.1 + seconds);
        }
        ahead
    }

    /// The caller who comes next: the one whose task is due for the longest time, else the one who has had the least.
    fn next(&self) -> Option<&str> {
        let due = self.callers.iter().filter_map(|(name, caller)| Some((caller.waiting.front()?, name)));
        let due = due.filter(|(waiting, _)| waiting.due < self.served).min_by(|(a, _), (b, _)| a.due.total_cmp(&b.due));
        if let Some((_, name)) = due {
            return Some(name);
        }
        let heads = self.callers.iter().filter_map(|(name, caller)| Some((caller.time, caller.waiting.front()?.number, name)));
        heads.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).map(|(.., name)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;

    /// The tasks in the order in which they come out.
    fn order(queue: &FairQueue<&'static str>) -> Vec<&'static str> {
        queue.close();
        std::iter::from_fn(|| queue.pop(|_| true)).collect()
    }

    fn filled(tasks: &[(&str, f64, &'static str)]) -> FairQueue<&'static str> {
        let queue = FairQueue::new();
        tasks.iter().for_each(|(caller, seconds, task)| queue.push(caller, *seconds, *task));
        queue
    }

    #[test]
    fn callers_take_turns_by_the_time_that_they_use() {
        let queue = filled(&[("a", 1.0, "a1"), ("a", 1.0, "a2"), ("a", 1.0, "a3"), ("b", 1.0, "b1"), ("b", 1.0, "b2")]);
        assert_eq!(order(&queue), ["a1", "b1", "a2", "b2", "a3"]);
        // A long task counts as many short ones.
        let queue =
            filled(&[("a", 3.0, "a1"), ("a", 3.0, "a2"), ("b", 1.0, "b1"), ("b", 1.0, "b2"), ("b", 1.0, "b3"), ("b", 1.0, "b4")]);
        assert_eq!(order(&queue), ["a1", "b1", "b2", "b3", "a2", "b4"]);
        // One caller alone is first come, first served.
        let queue = filled(&[("", 5.0, "1"), ("", 1.0, "2"), ("", 0.0, "3")]);
        assert_eq!(order(&queue), ["1", "2", "3"]);
    }

    #[test]
    fn idleness_saves_nothing_and_hurry_gains_nothing() {
        let queue = filled(&[("a", 1.0, "a1"), ("a", 1.0, "a2"), ("a", 1.0, "a3"), ("a", 1.0, "a4")]);
        assert_eq!((queue.pop(|_| true), queue.pop(|_| true)), (Some("a1"), Some("a2")));
        // Who comes late starts where the others are.
        ["b1", "b2", "b3"].into_iter().for_each(|task| queue.push("b", 1.0, task));
        assert_eq!(order(&queue), ["b1", "a3", "b2", "a4", "b3"]);
        // Who leaves after a long task and comes back at once is still behind.
        let queue = filled(&[("a", 10.0, "a1"), ("b", 1.0, "b1"), ("b", 1.0, "b2")]);
        assert_eq!(queue.pop(|_| true), Some("a1"));
        queue.push("a", 1.0, "a2");
        assert_eq!(order(&queue), ["b1", "b2", "a2"]);
    }

    #[test]
    fn canceled_tasks_cost_nothing_and_callers_are_forgotten() {
        let queue = filled(&[("a", 9.0, "gone"), ("a", 1.0, "a1"), ("b", 1.0, "b1")]);
        assert_eq!(queue.pop(|task| *task != "gone"), Some("gone"));
        assert_eq!(order(&queue), ["a1", "b1"]);
        let queue = FairQueue::new();
        for caller in 0..5000 {
            queue.push(&caller.to_string(), 1.0, "x");
            queue.pop(|_| true);
        }
        assert!(locked(&queue.queues).callers.len() <= MOST + 1, "callers that are gone take memory");
        queue.close();
        assert_eq!((queue.pop(|_| true), locked(&queue.queues).callers.len()), (None, 0));
    }

    #[test]
    fn waits_are_predicted() {
        let queue = filled(&[("a", 2.0, "a1"), ("a", 2.0, "a2"), ("b", 1.0, "b1")]);
        assert_eq!((queue.len(), queue.ahead("a"), queue.ahead("b"), queue.ahead("new")), (3, (3, 5.0), (2, 3.0), (2, 3.0)));
        assert_eq!(queue.pop(|_| true), Some("a1"));
        assert_eq!((queue.ahead("a"), queue.ahead("new")), ((2, 3.0), (1, 1.0)));
        assert_eq!(FairQueue::<()>::new().ahead("a"), (0, 0.0));
        // The prediction is what happens: whoever is added waits as long as it said.
        let queue = filled(&[("a", 2.0, "a1"), ("b", 1.0, "b1"), ("b", 4.0, "b2"), ("c", 3.0, "c1"), ("c", 1.0, "c2")]);
        let seconds = |task: &str| {
            if task == "a1" {
                2.0
            } else if task == "b2" {
                4.0
            } else if task == "c1" {
                3.0
            } else {
                1.0
            }
        };
        for caller in ["a", "b", "c", "d"] {
            let again = filled(&[("a", 2.0, "a1"), ("b", 1.0, "b1"), ("b", 4.0, "b2"), ("c", 3.0, "c1"), ("c", 1.0, "c2")]);
            again.push(caller, 1.0, "new");
            let ahead: f64 = order(&again).into_iter().take_while(|task| *task != "new").map(seconds).sum();
            assert_eq!(queue.ahead(caller).1, ahead, "{caller}");
        }
    }

    /// Callers who always have a task make a caller with many of them wait, but at most for what was predicted, and a share of it.
    #[test]
    fn nobody_is_overtaken_for_ever() {
        let queue = FairQueue::new();
        ["a1", "a2", "a3", "a4", "a5"].into_iter().for_each(|task| queue.push("a", 1.0, task));
        let mut order = Vec::new();
        for _ in 0..16 {
            for other in ["b", "c"] {
                if queue.len_of(other) == 0 {
                    queue.push(other, 1.0, other);
                }
            }
            order.extend(queue.pop(|_| true));
        }
        // It was predicted to begin after 4 s. Fair shares alone would let it wait for 12.
        let before = order.iter().position(|task| *task == "a5").unwrap();
        assert!((8..=9).contains(&before), "{order:?}");
        assert!(order[..6].contains(&"b") && order[..6].contains(&"c"), "{order:?}");
    }

    #[test]
    fn tasks_leave_the_queue_before_their_turn() {
        let queue = filled(&[("a", 2.0, "a1"), ("a", 2.0, "gone"), ("b", 1.0, "b1"), ("b", 3.0, "b2")]);
        queue.retain(|task| *task != "gone");
        assert_eq!((queue.len(), queue.len_of("a"), queue.len_of("c"), queue.seconds()), (3, 1, 0, 6.0));
        // In the order of their turns, a1 ends after 2 s, b1 after 3 s and b2 after 6 s.
        queue.keep_first(5.9);
        assert_eq!((queue.len(), queue.seconds()), (2, 3.0));
        queue.keep_first(-1.0);
        assert_eq!((queue.len(), order(&queue).len()), (0, 0));
    }

    #[test]
    fn a_closed_queue_takes_nothing_and_wakes_who_waits() {
        let queue = Arc::new(FairQueue::new());
        let own = queue.clone();
        let waiting = std::thread::spawn(move || (own.pop(|_| true), own.pop(|_| true)));
        std::thread::sleep(Duration::from_millis(20));
        queue.push("a", 1.0, 7);
        std::thread::sleep(Duration::from_millis(20));
        queue.close();
        assert_eq!(waiting.join().unwrap(), (Some(7), None));
        queue.push("a", 1.0, 8);
        assert_eq!((queue.len(), queue.pop(|_| true)), (0, None));
        let queue = FairQueue::new();
        let task = Arc::new(());
        queue.push("a", 1.0, task.clone());
        queue.clear();
        assert_eq!((Arc::strong_count(&task), queue.len()), (1, 0));
    }
}
