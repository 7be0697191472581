//! A connection whose client must not be too slow: it has to send a header in time, may be idle between requests for a while, and has to
//! take its answers. A connection that breaks a limit ends, and with it whatever it waits for.

use super::limits::{ANSWER_TIME, HEADER_TIME, IDLE_TIME};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// The other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A client of the network, and the address at which it reached the server.
    Address { remote: IpAddr, local: SocketAddr },
    /// A program of the same user.
    Socket { uid: u32 },
}

/// What a connection is doing, as far as its client may be slow about it.
#[derive(Clone)]
pub struct Activity(Arc<Mutex<State>>);

#[derive(Clone, Copy)]
enum State {
    /// The header of a request arrives.
    Header { since: Instant },
    /// A request is answered. Its body has a time limit of its own.
    Request,
    /// The next request may come.
    Idle { since: Instant },
}

impl Activity {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(State::Header { since: Instant::now() })))
    }

    fn set(&self, state: State) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    fn state(&self) -> State {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request has arrived.
    pub fn begin(&self) {
        self.set(State::Request);
    }

    /// The answer is on its way.
    pub fn end(&self) {
        self.set(State::Idle { since: Instant::now() });
    }

    /// When the client is too late.
    fn deadline(&self) -> Option<Instant> {
        match self.state() {
            State::Header { since } => Some(since + HEADER_TIME),
            State::Idle { since } => Some(since + IDLE_TIME),
            State::Request => None,
        }
    }

    /// Bytes have come.
    fn received(&self) {
        if let State::Idle { .. } = self.state() {
            self.set(State::Header { since: Instant::now() });
        }
    }
}

/// A stream with limits on its client's time.
pub struct Timed<S> {
    stream: S,
    activity: Activity,
    reading: Timer,
    writing: Timer,
}

impl<S> Timed<S> {
    pub fn new(stream: S) -> (Self, Activity) {
        let activity = Activity::new();
        (Self { stream, activity: activity.clone(), reading: Timer(None), writing: Timer(None) }, activity)
    }

    /// An error if the client takes nothing for too long.
    fn waits_to_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let until = self.writing.0.as_ref().map_or_else(|| Instant::now() + ANSWER_TIME, |timer| timer.deadline());
        self.writing.poll(cx, until)
    }
}

/// A timer that is set again whenever its time changes.
struct Timer(Option<Pin<Box<Sleep>>>);

impl Timer {
    /// The error of a client who is late.
    fn poll(&mut self, cx: &mut Context<'_>, until: Instant) -> Poll<io::Error> {
        let timer = self.0.get_or_insert_with(|| Box::pin(sleep_until(until)));
        if timer.deadline() != until {
            timer.as_mut().reset(until);
        }
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(io::ErrorKind::TimedOut.into())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Timed<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, buffer) {
            if buffer.filled().len() > before {
                self.activity.received();
            }
            return Poll::Ready(read);
        }
        match self.activity.deadline() {
            Some(until) => self.reading.poll(cx, until).map(Err),
            None => Poll::Pending,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Timed<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(cx, bytes) {
            Poll::Pending => self.waits_to_write(cx).map(Err),
            written => {
                self.writing.0 = None;
                written
            }
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write_vectored(cx, slices) {
            Poll::Pending => self.waits_to_write(cx).map(Err),
            written => {
                self.writing.0 = None;
                written
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The time that a body of this length may take.
pub fn body_time(bytes: usize) -> Duration {
    super::limits::BODY_TIME + super::limits::BODY_TIME_PER_MIB * u32::try_from(bytes >> 20).unwrap_or(u32::MAX)
}
