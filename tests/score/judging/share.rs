//! Counts how many verdicts passed.

/// The number of passes, and the total.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Share {
    pub right: usize,
    pub of: usize,
}

impl Share {
    pub fn of(all: impl IntoIterator<Item = bool>) -> Self {
        all.into_iter().fold(Self::default(), |s, right| Self { right: s.right + usize::from(right), of: s.of + 1 })
    }

    /// The percentage of passes; zero if the total is zero.
    pub fn percent(self) -> f64 {
        100.0 * self.right as f64 / self.of.max(1) as f64
    }
}
