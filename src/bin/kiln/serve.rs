//! `kiln serve`: OpenAI's images API on one engine.
//!
//! Three kinds of threads. One runs the HTTP side and never computes: it lets requests in, queues their images and sends answers. One owns
//! the engine ([`Service`](kiln::service::Service)). The others read requests, decode their images and encode what was made. A request
//! becomes a [`plan::Plan`] and then a [`work::Work`], which its connections share; when the last of them is gone, its images leave the queue.

mod admission;
mod answer;
mod body;
mod connection;
mod engine;
mod guard;
mod handler;
mod images;
mod keys;
mod limits;
mod listen;
mod log;
mod metrics;
mod model;
mod plan;
mod rates;
mod retries;
mod route;
mod run;
mod server;
mod status;
mod store;
mod work;

pub use engine::EngineRequest;
pub use keys::Keys;
pub use limits::{CONNECTIONS, CONNECTIONS_OF_ADDRESS, WAITING};
pub use listen::{tcp, usual_socket};
pub use model::adapters_in;
pub use run::{ServeRequest, serve};

/// What the user decides about the server.
pub struct Config {
    pub keys: Keys,
    /// Names of this server, other than its address, in lower case; with a port or without.
    pub allowed_hosts: Vec<String>,
    /// Origins whose pages may use the server.
    pub allowed_origins: Vec<String>,
    /// The address of the server as its clients see it, without a path.
    pub public_url: Option<String>,
    /// The most images that wait.
    pub max_waiting: usize,
    /// The most connections of one address.
    pub client_connections: usize,
    /// Whether requests that succeed are left out of the log.
    pub is_quiet: bool,
}

#[cfg(test)]
impl Config {
    /// A server without keys.
    fn for_tests() -> Self {
        Self {
            keys: Keys::default(),
            allowed_hosts: Vec::new(),
            allowed_origins: Vec::new(),
            public_url: None,
            max_waiting: limits::WAITING,
            client_connections: limits::CONNECTIONS_OF_ADDRESS,
            is_quiet: false,
        }
    }
}
