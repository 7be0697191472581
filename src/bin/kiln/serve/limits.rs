//! The limits of the server. Each bounds what a client can cost: connections, time, memory and the engine's work.

use std::time::Duration;

/// Limit on open connections.
pub const CONNECTIONS: usize = 256;

/// Limit on open connections of one address.
pub const CONNECTIONS_OF_ADDRESS: usize = 32;

/// Limit on the bytes of a request's line and headers.
pub const HEADER_BYTES: usize = 16 << 10;

/// The time for a whole header, from the connection's start or the first byte of a later request.
pub const HEADER_TIME: Duration = Duration::from_secs(5);

/// How long a connection may be idle between two requests.
pub const IDLE_TIME: Duration = Duration::from_secs(60);

/// Limit on the bytes of a body.
pub const BODY_BYTES: usize = 64 << 20;

/// The time for a body, without the time that its length adds.
pub const BODY_TIME: Duration = Duration::from_secs(30);

/// The time that each MiB of a body adds.
pub const BODY_TIME_PER_MIB: Duration = Duration::from_secs(1);

/// How long a client may take no byte of an answer.
pub const ANSWER_TIME: Duration = Duration::from_secs(30);

/// Limit on the bytes of all bodies that are read or wait for their turn.
pub const UPLOADED_BYTES: u64 = 512 << 20;

/// Limit on the bytes of decoded images that wait for their turn. Beyond it images wait as files, and are decoded once more.
pub const DECODED_BYTES: u64 = 256 << 20;

/// How many requests are read and their images decoded at the same time.
pub const READERS: usize = 2;

/// Memory of the device that no job is admitted to.
pub const SPARE_BYTES: u64 = 512 << 20;

/// Limit on the images that wait for their turn.
pub const WAITING: usize = 256;

/// Limit on the predicted seconds of all images that wait.
pub const WAITING_SECONDS: f64 = 120.0;

/// Limit on the predicted seconds of one image.
pub const IMAGE_SECONDS: f64 = 300.0;

/// The time that a server takes for images that it has accepted, once it is asked to end.
pub const DRAIN_TIME: Duration = Duration::from_secs(27);

/// Waiting images that are predicted to end later than this are refused at the end.
pub const DRAIN_SECONDS: f64 = 25.0;

/// The time for answers to reach their clients after the last image.
pub const FLUSH_TIME: Duration = Duration::from_secs(1);

/// The pause before a comment tells a client and its proxies that a stream is alive.
pub const STREAM_PAUSE: Duration = Duration::from_secs(10);
