//! Lines of the log, one for each request: `key=value` pairs on standard error. No prompt, no key, no address and no path is in them.

use super::metrics::Metrics;
use crate::terminal::Terminal;
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// Writes the log.
pub struct Log {
    terminal: Arc<Terminal>,
}

impl Log {
    pub fn new(terminal: Arc<Terminal>) -> Self {
        Self { terminal }
    }

    /// Writes an event with its pairs.
    pub fn write(&self, event: &str, pairs: &[(&str, String)]) {
        let mut line = format!("time={} event={event}", timestamp(SystemTime::now()));
        for (key, value) in pairs {
            let _ = write!(line, " {key}={}", quoted(value));
        }
        self.terminal.log(&line);
    }
}

/// A value as it stands in a line: in quotes if it is more than a word.
fn quoted(value: &str) -> String {
    let is_word = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"' && byte != b'=');
    if is_word { value.into() } else { serde_json::Value::from(kiln::text::shown_line(value)).to_string() }
}

/// A moment in UTC, as in 2026-11-19T07:05:03.120Z.
fn timestamp(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds, millis) = (since.as_secs() / 86_400, since.as_secs() % 86_400, since.subsec_millis());
    // Counted in years from March on, a leap day is the last of its year. Four centuries have 146,097 days.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = 400 * era + year + next;
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// A request, for its line of the log and its row of the metrics, which are written when this is dropped.
pub struct Record {
    pub log: Arc<Log>,
    /// Ends the server's count of requests that have no answer yet.
    pub _open: watch::Receiver<()>,
    pub metrics: Arc<Metrics>,
    /// Whether a request has no line unless the server is at fault.
    pub is_quiet: bool,
    pub id: String,
    pub method: String,
    pub route: &'static str,
    pub status: u16,
    /// The word of an error.
    pub code: Option<&'static str>,
    /// The name of the caller's key.
    pub key: Option<String>,
    pub since: Instant,
    /// Bytes of the answer's body.
    pub bytes: u64,
    /// Whether the answer was handed out to its end.
    pub is_whole: bool,
}

impl Drop for Record {
    fn drop(&mut self) {
        self.metrics.count_request(self.route, self.status);
        if self.is_quiet && (self.status < 500 || self.status == 503) {
            return;
        }
        let mut pairs = vec![
            ("id", self.id.clone()),
            ("method", self.method.clone()),
            ("route", self.route.into()),
            ("status", self.status.to_string()),
            ("ms", self.since.elapsed().as_millis().to_string()),
            ("bytes", self.bytes.to_string()),
        ];
        pairs.extend(self.code.map(|code| ("code", code.into())));
        pairs.extend(self.key.clone().map(|key| ("key", key)));
        if !self.is_whole {
            pairs.push(("gone", "true".into()));
        }
        self.log.write("request", &pairs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn timestamps_know_the_calendar() {
        let at = |seconds: u64, millis: u64| timestamp(UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_millis(millis));
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_399, 7), "2000-02-28T23:59:59.007Z");
        assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_795_071_903, 120), "2026-11-19T07:05:03.120Z");
        assert_eq!(at(4_107_542_399, 999), "2100-02-28T23:59:59.999Z");
        assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn values_stay_on_their_line() {
        assert_eq!(quoted("abc-1"), "abc-1");
        assert_eq!(quoted(""), "\"\"");
        assert_eq!(quoted("a b=c\"\n\u{1b}[0m"), "\"a b=c\\\"\\\\n\\\\u{1b}[0m\"");
    }
}
