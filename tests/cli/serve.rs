//! `kiln serve`: what it answers and to whom, how it behaves under load and hostile clients, and how it starts and ends. All of it with
//! the real program and plain sockets.
#![cfg(all(target_os = "linux", feature = "serve"))]

mod answers;
mod behavior;
mod edits;
mod hostile;
mod http;
mod life;
mod queue;
mod security;
mod server;
mod signals;
mod strangers;
mod streams;
