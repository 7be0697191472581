//! The life of the server: it listens, loads the model, answers, and ends in order.

use super::Config;
use super::connection::{Peer, Timed};
use super::engine::{EngineRequest, check_adapters};
use super::handler::handle;
use super::images::unix_time;
use super::limits::{CONNECTIONS, DRAIN_SECONDS, DRAIN_TIME, FLUSH_TIME, HEADER_BYTES, READERS};
use super::listen::{self, Socket};
use super::log::Log;
use super::server::{Phase, Running, Server};
use super::work::{Made, encode_all};
use crate::cli::Signals;
use futures_util::future::{Either, select};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use kiln::error::{Error, Result};
use kiln::image::Threads;
use kiln::locate::Environment;
use kiln::progress::Progress;
use kiln::service::Service;
use kiln::text::shown_path;
use kiln::threads;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{sleep, timeout};

/// The pause after the system refused a connection, for example because all file handles are taken.
const REFUSED_PAUSE: Duration = Duration::from_millis(50);

/// What to serve, and where.
pub struct ServeRequest {
    pub config: Config,
    pub engine: EngineRequest,
    pub listener: TcpListener,
    /// The place of the Unix socket, and whether the user named it.
    pub socket: Option<(PathBuf, bool)>,
    /// The files of adapters by their names.
    pub adapters: BTreeMap<String, PathBuf>,
    pub lora_partial: bool,
    pub environment: Environment,
}

/// Serves until a signal comes or the device fails.
pub fn serve(request: ServeRequest, signals: &Signals) -> Result<()> {
    let ServeRequest { config, engine, listener, socket, adapters, lora_partial, environment } = request;
    let terminal = engine.terminal.clone();
    let socket = match socket {
        None => None,
        Some((path, is_named)) => match (listen::socket(&path), is_named) {
            (Ok(None), true) => {
                let what = format!("another server has this socket ({})", shown_path(&path));
                return Err(Error::usage(what, "end it, or name another place with --socket"));
            }
            (Err(error), true) => return Err(error),
            (Ok(None), false) => {
                terminal.say("note: another server has this user's socket, so this one has none");
                None
            }
            (Err(error), false) => {
                terminal.warn(&format!("{error}"));
                None
            }
            (Ok(socket), _) => socket,
        },
    };
    let server = Server::new(config, Log::new(terminal.clone()));
    let address = listener.local_addr().map_err(|error| Error::usage(format!("cannot listen: {error}"), "try another port"))?;
    terminal.say(&format!("listening on http://{address}"));
    if let Some(socket) = &socket {
        terminal.say(&format!("listening on {}", shown_path(&socket.file.path)));
    }
    let wake = wake_on_signal(signals)?;
    let (http, halt) = (server.clone(), engine.halt.clone());
    let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
        let thread = std::thread::Builder::new().name(name.into()).stack_size(threads::STACK).spawn(work);
        thread.map_err(|error| Error::Threads { count: 1, why: error.to_string() })
    };
    let http = spawn(
        "http",
        Box::new(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_io()
                .enable_time()
                .max_blocking_threads(READERS)
                .thread_stack_size(threads::STACK)
                .build();
            match runtime {
                Ok(runtime) => {
                    runtime.block_on(live(http, listener, socket, wake, &halt));
                    // A request that is still read has no client any more.
                    runtime.shutdown_background();
                }
                Err(error) => {
                    http.fail(Error::Threads { count: 1, why: error.to_string() });
                    halt.store(true, Ordering::Relaxed);
                }
            }
        }),
    )?;
    let (sender, tasks) = channel();
    let encoder = spawn(
        "encoder",
        Box::new(move || {
            encode_all(tasks, |plan, image| {
                let settings = plan.settings.get()?;
                let text = plan.model().origin.text(&settings, image.seed, plan.format);
                let file = image.image.encode(plan.format, &text, Threads::All)?;
                Ok(Made::new(plan, image, file))
            });
        }),
    )?;
    let own = engine.clone();
    let started = Service::start_renewable(move || own.build()).and_then(|(service, known)| {
        let model = Arc::new(known.model(adapters, environment, lora_partial, unix_time()));
        check_adapters(&model)?;
        Ok(Running { service, model, encoder: sender })
    });
    match started {
        Ok(running) => {
            let name = running.model.profile.name.clone();
            server.begin(running);
            if server.phase() == Phase::Ready {
                terminal.say(&format!("{name}, ready at http://{address}"));
                notify_manager("READY=1");
            }
        }
        Err(error) => server.fail(error),
    }
    // The thread caught its own panics, as far as there were any.
    let _ = http.join();
    notify_manager("STOPPING=1");
    let end = server.take_failure();
    // The engine ends with the last holder of the server. Tasks that were cut short may hold it for a moment.
    drop(server);
    engine.halt.store(true, Ordering::Relaxed);
    drop(encoder);
    Err(end.unwrap_or(Error::Interrupted))
}

/// A stream that ends waiting when a signal arrives.
fn wake_on_signal(signals: &Signals) -> Result<std::os::unix::net::UnixStream> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let failed = |error: io::Error| Error::Threads { count: 1, why: error.to_string() };
    let (reader, writer) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
    for signal in [SIGINT, SIGTERM] {
        let writer = writer.try_clone().map_err(failed)?;
        signal_hook::low_level::pipe::register(signal, writer).map_err(failed)?;
    }
    reader.set_nonblocking(true).map_err(failed)?;
    // It may have come before.
    if signals.stop.load(Ordering::Relaxed) {
        let _ = (&writer).write_all(b"x");
    }
    Ok(reader)
}

/// Tells a service manager such as systemd how far the server is, if there is one.
fn notify_manager(state: &str) {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    // Without a manager that listens the server works as well.
    let _ = UnixDatagram::unbound().and_then(|socket| socket.send_to_addr(state.as_bytes(), &address?));
}

/// Accepts connections until the server ends.
async fn live(
    server: Arc<Server>,
    listener: TcpListener,
    socket: Option<Socket>,
    wake: std::os::unix::net::UnixStream,
    halt: &std::sync::atomic::AtomicBool,
) {
    let mut accepting = Vec::new();
    match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => accepting.push(tokio::spawn(accept_tcp(server.clone(), listener))),
        Err(error) => server.fail(Error::Threads { count: 1, why: error.to_string() }),
    }
    // The socket's file goes when the server stops to accept.
    let (listener, file) = socket.map_or((None, None), |Socket { listener, file }| (Some(listener), Some(file)));
    if let Some(listener) = listener.and_then(|listener| tokio::net::UnixListener::from_std(listener).ok()) {
        accepting.push(tokio::spawn(accept_socket(server.clone(), listener)));
    }
    let signaled = pin!(signaled(wake));
    let ended = pin!(server.at(Phase::Draining));
    if let Either::Left(_) = select(signaled, ended).await {
        if server.phase() == Phase::Loading {
            halt.store(true, Ordering::Relaxed);
        }
        server.enter(Phase::Draining);
    }
    accepting.iter().for_each(tokio::task::JoinHandle::abort);
    drop(file);
    if let Some(Running { service, .. }) = server.running() {
        if server.phase() == Phase::Draining {
            server.log.write("drain", &[("waiting", service.waiting().to_string())]);
            service.drain(DRAIN_SECONDS);
            let fault = pin!(server.at(Phase::Faulted));
            let answered = pin!(timeout(DRAIN_TIME, server.all_answered()));
            select(fault, answered).await;
        }
        service.stop();
    }
    let _ = timeout(FLUSH_TIME, server.all_answered()).await;
    server.enter(Phase::Ended);
    // Answers are on their way to clients who may be slow to take them.
    let flushed = async {
        while server.connections() > 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    let _ = timeout(FLUSH_TIME, flushed).await;
}

/// Waits for a signal.
async fn signaled(wake: std::os::unix::net::UnixStream) {
    let Ok(wake) = tokio::net::UnixStream::from_std(wake) else { return std::future::pending().await };
    loop {
        if wake.readable().await.is_err() {
            return;
        }
        match wake.try_read(&mut [0; 8]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}

/// How many connections each address has.
type Addresses = Arc<Mutex<BTreeMap<IpAddr, usize>>>;

/// Counts a connection until it ends.
struct Slot {
    server: Arc<Server>,
    address: Option<(Addresses, IpAddr)>,
}

impl Slot {
    /// A place for a connection, if there is one.
    fn new(server: &Arc<Server>, address: Option<(&Addresses, IpAddr)>) -> Option<Self> {
        if !server.count_connection(CONNECTIONS) {
            return None;
        }
        let mut slot = Self { server: server.clone(), address: None };
        if let Some((addresses, address)) = address {
            let mut all = addresses.lock().unwrap_or_else(PoisonError::into_inner);
            let count = all.entry(address).or_default();
            if *count >= server.config.client_connections {
                return None;
            }
            *count += 1;
            slot.address = Some((addresses.clone(), address));
        }
        Some(slot)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.server.end_connection();
        if let Some((addresses, address)) = &self.address {
            let mut all = addresses.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(count) = all.get_mut(address) {
                *count -= 1;
                if *count == 0 {
                    all.remove(address);
                }
            }
        }
    }
}

async fn accept_tcp(server: Arc<Server>, listener: tokio::net::TcpListener) {
    let addresses = Addresses::default();
    loop {
        let Ok((stream, remote)) = listener.accept().await else {
            sleep(REFUSED_PAUSE).await;
            continue;
        };
        let remote = remote.ip().to_canonical();
        let (Some(slot), Ok(local)) = (Slot::new(&server, Some((&addresses, remote))), stream.local_addr()) else { continue };
        let _ = stream.set_nodelay(true);
        let local = std::net::SocketAddr::new(local.ip().to_canonical(), local.port());
        tokio::spawn(talk(server.clone(), stream, Peer::Address { remote, local }, slot));
    }
}

async fn accept_socket(server: Arc<Server>, listener: tokio::net::UnixListener) {
    let own = rustix::process::geteuid().as_raw();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(REFUSED_PAUSE).await;
            continue;
        };
        // Other users have no business here, whatever the permissions of the file.
        let uid = stream.peer_cred().ok().map(|credentials| credentials.uid());
        let (Some(slot), Some(uid)) = (Slot::new(&server, None), uid.filter(|uid| *uid == own)) else { continue };
        tokio::spawn(talk(server.clone(), stream, Peer::Socket { uid }, slot));
    }
}

/// Answers the requests of a connection.
async fn talk(server: Arc<Server>, stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, peer: Peer, slot: Slot) {
    let _slot = slot;
    let (stream, activity) = Timed::new(stream);
    let ended = server.at(Phase::Ended);
    let service = service_fn(move |request| handle(server.clone(), peer.clone(), activity.clone(), request));
    let mut http = http1::Builder::new();
    // The connection has timers of its own, which allow more time between requests than within a header.
    http.header_read_timeout(None).max_buf_size(HEADER_BYTES);
    let talk = pin!(http.serve_connection(TokioIo::new(stream), service));
    // A connection that ends in an error has nobody to tell.
    match select(talk, pin!(ended)).await {
        Either::Left(_) => {}
        Either::Right((_, mut talk)) => {
            talk.as_mut().graceful_shutdown();
            let _ = talk.await;
        }
    }
}
