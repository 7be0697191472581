//! A server for tests, and requests for small images.

use common::http::{Answer, Connection, PATIENCE, Part, Request};
use common::sandbox::{Run, Sandbox, send, tiny_with_short_prompts};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A key of the server that needs one, and its name in the log.
pub const KEY: (&str, &str) = ("team-a", "0123456789abcdefKEYa");

/// The tiny model for images of 64x64, which makes a server start quickly. It is stored next to the program.
pub fn small_model() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let whole = tiny_with_short_prompts();
        let folder = whole.with_extension("small");
        if !folder.is_dir() {
            let unfinished = folder.with_extension(std::process::id().to_string());
            write_model(&unfinished, 64);
            // Another process may have been first.
            if fs::rename(&unfinished, &folder).is_err() {
                fs::remove_dir_all(&unfinished).unwrap();
            }
        }
        folder
    });
    &FOLDER
}

/// Makes a folder with the files of the tiny model, and images of this size.
pub fn write_model(folder: &Path, side: usize) {
    fs::create_dir_all(folder).unwrap();
    for entry in fs::read_dir(tiny_with_short_prompts()).unwrap().map(Result::unwrap) {
        if entry.file_name() != "kiln.json" {
            std::os::unix::fs::symlink(entry.path(), folder.join(entry.file_name())).unwrap();
        }
    }
    let settings = json!({"max_text_tokens": 64, "width": side, "height": side});
    fs::write(folder.join("kiln.json"), settings.to_string()).unwrap();
}

/// Waits until something holds.
pub fn eventually(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Lines of standard error.
#[derive(Default)]
struct Lines {
    state: Mutex<(String, bool)>,
    news: Condvar,
}

/// A running server. It is killed when this is dropped.
pub struct Server {
    pub child: Child,
    pub address: SocketAddr,
    pub sandbox: Sandbox,
    lines: Arc<Lines>,
}

/// A command for the program in a sandbox, which sees no setting of this machine's.
pub fn command(sandbox: &Sandbox, args: &[&str]) -> Command {
    let mut command = sandbox.command(args);
    for name in ["XDG_RUNTIME_DIR", "NOTIFY_SOCKET", "KILN_API_KEY"] {
        command.env_remove(name);
    }
    command.env("KILN_MODEL", small_model());
    command
}

/// A command that serves with these flags at any port, on one thread.
pub fn serve(sandbox: &Sandbox, flags: &[&str]) -> Command {
    let has = |name: &str| flags.contains(&name);
    let mut args = vec!["serve", "--threads", "1", "--precision", "f32"];
    args.extend(if has("--listen") { [].as_slice() } else { &["--listen", "127.0.0.1:0"] });
    args.extend(flags);
    command(sandbox, &args)
}

/// Flags without a Unix socket.
pub fn without_socket<'a>(flags: &[&'a str]) -> Vec<&'a str> {
    [&["--socket", "none"], flags].concat()
}

/// Waits for the end of a process.
pub fn wait(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > PATIENCE {
            let _ = child.kill();
            panic!("the process does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a server that has to end by itself: its exit code and standard error.
pub fn ends(mut command: Command) -> (Option<i32>, String) {
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let stderr = child.stderr.take().unwrap();
    let reader = std::thread::spawn(move || std::io::read_to_string(stderr).unwrap());
    let code = wait(&mut child).code();
    (code, reader.join().unwrap())
}

impl Server {
    /// A server that is ready.
    pub fn start(flags: &[&str]) -> Self {
        Self::in_sandbox(Sandbox::new(), flags)
    }

    /// A server in a folder that was prepared.
    pub fn in_sandbox(sandbox: Sandbox, flags: &[&str]) -> Self {
        let command = serve(&sandbox, &without_socket(flags));
        let server = Self::launch(sandbox, command);
        server.wait_for(", ready at ");
        server
    }

    /// Starts a command, and waits until it listens.
    pub fn launch(sandbox: Sandbox, mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let lines = Arc::<Lines>::default();
        let own = lines.clone();
        std::thread::spawn(move || {
            let mut all = stderr.lines();
            loop {
                let line = all.next();
                let mut state = own.state.lock().unwrap_or_else(PoisonError::into_inner);
                match line {
                    Some(Ok(line)) => state.0 += &(line + "\n"),
                    _ => state.1 = true,
                }
                own.news.notify_all();
                if state.1 {
                    return;
                }
            }
        });
        let mut server = Self { child, address: ([127, 0, 0, 1], 0).into(), sandbox, lines };
        let log = server.wait_for("listening on http://");
        let line = log.lines().find_map(|line| line.strip_prefix("listening on http://")).unwrap();
        server.address = line.parse().unwrap();
        server
    }

    /// Waits until standard error has this text, and returns all of it.
    pub fn wait_for(&self, text: &str) -> String {
        let state = self.lines.state.lock().unwrap_or_else(PoisonError::into_inner);
        // The last line may be half there.
        let waits = |state: &mut (String, bool)| !state.0.contains(text) && !state.1;
        let (state, _) = self.lines.news.wait_timeout_while(state, PATIENCE, waits).unwrap_or_else(PoisonError::into_inner);
        assert!(state.0.contains(text), "no {text:?} in {}", state.0);
        state.0.clone()
    }

    /// Standard error so far.
    pub fn log(&self) -> String {
        self.lines.state.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// The value of the header `Host`.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    pub fn connect(&self) -> Connection {
        Connection::to(self.address)
    }

    /// Sends a request on a connection of its own.
    pub fn ask(&self, request: &Request) -> Answer {
        self.connect().ask(&self.host(), request)
    }

    pub fn get(&self, target: &str) -> Answer {
        self.ask(&Request::get(target))
    }

    /// Asks for images.
    pub fn generate(&self, body: &Value) -> Answer {
        self.ask(&Request::json("/v1/images/generations", body))
    }

    /// Sends a request and leaves its answer for later.
    pub fn begin(&self, request: &Request) -> Connection {
        let mut connection = self.connect();
        connection.send(&request.bytes(&self.host()));
        connection
    }

    /// Starts an image that takes long, and waits until the engine works on it. Dropping the connection cancels it.
    pub fn occupy(&self) -> Connection {
        let body = json!({"prompt": "", "size": "192x192", "steps": 64, "stream": true, "progress": true, "user": "occupant"});
        let mut connection = self.begin(&Request::json("/v1/images/generations", &body));
        assert_eq!(connection.head().unwrap().status, 200);
        while connection.event().expect("progress").1["phase"] != "denoise" {}
        connection
    }

    /// The value of a metric.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.ask(&Request::get("/metrics").with("Authorization", &format!("Bearer {}", KEY.1))).good();
        let line = text.text().lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned));
        line.map_or(0.0, |value| value.parse().unwrap())
    }

    /// The images that were made.
    pub fn made(&self) -> f64 {
        self.metric("kiln_images_total{result=\"done\"}")
    }

    /// Waits until a metric has a value.
    pub fn reaches(&self, name: &str, value: f64) {
        eventually(&format!("{name} is {value}"), || self.metric(name) == value);
    }

    /// Sends a signal, `-INT` or `-TERM`.
    pub fn signal(&self, name: &str) {
        send(name, &self.child);
    }

    /// Waits for the end: the exit code and standard error.
    pub fn end(mut self) -> (Option<i32>, String) {
        let code = wait(&mut self.child).code();
        let state = self.lines.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = self.lines.news.wait_timeout_while(state, PATIENCE, |state| !state.1);
        let text = ended.unwrap_or_else(PoisonError::into_inner).0.0.clone();
        (code, text)
    }

    /// A line of `/proc/PID/status` in KiB, such as the largest resident memory.
    pub fn kib(&self, name: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server that all tests share. Statics are never dropped, so a helper ends it after the tests, when its standard input closes.
pub struct Shared {
    pub server: Server,
    _helper: Child,
}

impl Shared {
    fn new(server: Server) -> Self {
        let mut helper = Command::new("sh");
        helper.args(["-c", "read _; kill -9 \"$1\"; rm -rf \"$2\"", "sh", &server.child.id().to_string()]).arg(&server.sandbox.0);
        let helper = helper.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        Self { server, _helper: helper }
    }
}

/// A server without a key. Tests that count or fill its queue start one of their own.
pub fn plain() -> &'static Server {
    static SHARED: LazyLock<Shared> = LazyLock::new(|| Shared::new(Server::start(&[])));
    &SHARED.server
}

/// A server with keys, names and an origin that it allows.
pub fn guarded() -> &'static Server {
    static SHARED: LazyLock<Shared> = LazyLock::new(|| {
        let sandbox = Sandbox::new();
        fs::write(sandbox.path("keys"), format!("# teams\n{}:{}\nteam-b:fedcba9876543210b\n", KEY.0, KEY.1)).unwrap();
        let flags = ["--api-key-file", "keys", "--allow-origin", "https://app.example", "--allow-host", "box.lan:7878"];
        Shared::new(Server::in_sandbox(sandbox, &[&flags[..], &["--allow-host", "host.docker.internal"]].concat()))
    });
    &SHARED.server
}

/// A request for a small image, with other fields.
pub fn small(fields: &Value) -> Value {
    let mut body = json!({"prompt": "a fox", "seed": 7, "size": "64x64", "steps": 1});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// Runs `kiln generate` with the settings of [`small`], other than the size.
pub fn generated(sandbox: &Sandbox, flags: &[&str]) -> Run {
    let usual = ["a fox", "--seed", "7", "--precision", "f32", "--threads", "1", "--force", "-q"];
    let has = |name: &str| flags.contains(&name);
    let steps = if has("--steps") { [].as_slice() } else { &["--steps", "1"] };
    Run::of(command(sandbox, &[&usual, steps, flags].concat())).good()
}

/// A data URL.
pub fn data_url(file: &[u8]) -> String {
    format!("data:image/png;base64,{}", String::from_utf8(kiln::base64::encode(file)).unwrap())
}

/// The parts of a form for a small image, with other parts.
pub fn small_parts<'a>(more: &[Part<'a>]) -> Vec<Part<'a>> {
    [&[Part::Text("prompt", "a fox"), Part::Text("seed", "7")], more].concat()
}

/// A connection over a Unix socket.
pub fn over(path: &Path) -> Connection<UnixStream> {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    Connection::over(stream)
}
