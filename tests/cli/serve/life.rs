//! How a server starts: addresses, sockets, models that do not load, and what it leaves on the disk.

use super::server::{Server, ends, over, serve, small, without_socket, write_model};
use common::http::Request;
use common::sandbox::Sandbox;
use serde_json::json;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn a_port_has_one_server() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let sandbox = Sandbox::new();
    let (code, told) = ends(serve(&sandbox, &without_socket(&["--listen", &address])));
    assert_eq!(code, Some(2), "{told}");
    assert!(told.starts_with(&format!("error: cannot listen on {address}: ")), "{told}");
    assert!(told.contains("hint: another program has this port; choose one with --listen"), "{told}");
    for (flags, why) in [
        (["--max-waiting", "0"], "--max-waiting"),
        (["--trace", "t.json"], "--trace is about a run that ends"),
        (["--allow-origin", "*"], "expected a scheme and a host"),
        (["--public-url", "https://a/b"], "expected a scheme and a host"),
    ] {
        let (code, told) = ends(serve(&sandbox, &without_socket(&flags)));
        assert!(code == Some(2) && told.contains(why), "{flags:?}: {told}");
    }
    for (listen, why) in [("192.0.2.1:1", "cannot listen on"), ("example.com:80", "expected an address and a port")] {
        let (code, told) = ends(serve(&sandbox, &without_socket(&["--insecure", "--listen", listen])));
        assert!(code == Some(2) && told.contains(why), "{listen}: {told}");
    }
    assert_eq!(sandbox.names(), [""; 0]);
}

#[test]
fn a_model_that_does_not_load_ends_the_server() {
    let sandbox = Sandbox::new();
    let told = |flags: &[&str]| ends(serve(&sandbox, &[&["--socket", "kiln.sock"], flags].concat()));
    let (code, text) = told(&["--model", "missing"]);
    assert!(code == Some(3) && text.contains("error: ") && text.contains("missing"), "{code:?}: {text}");
    // Weights that end early.
    write_model(&sandbox.path("cut"), 64);
    let weights = sandbox.path("cut/transformer");
    let whole = fs::canonicalize(&weights).unwrap();
    fs::remove_file(&weights).unwrap();
    fs::create_dir(&weights).unwrap();
    for entry in fs::read_dir(whole).unwrap().map(Result::unwrap) {
        let bytes = fs::read(entry.path()).unwrap();
        let is_weights = entry.path().extension().is_some_and(|extension| extension == "safetensors");
        let kept = if is_weights { bytes.len() - 1 } else { bytes.len() };
        fs::write(weights.join(entry.file_name()), &bytes[..kept]).unwrap();
    }
    let (code, text) = told(&["--model", "cut"]);
    assert!(code == Some(3) && text.contains("error: truncated"), "{code:?}: {text}");
    // Adapters that do not fit.
    fs::create_dir(sandbox.path("styles")).unwrap();
    fs::write(sandbox.path("styles/bad.safetensors"), "not an adapter").unwrap();
    let (code, text) = told(&["--adapters", "styles"]);
    assert!(code == Some(3) && text.contains("bad.safetensors"), "{code:?}: {text}");
    let (code, text) = told(&["--adapters", "nowhere"]);
    assert!(code == Some(3) && text.contains("nowhere"), "{code:?}: {text}");
    // A GPU that is not there.
    let (code, text) = told(&["--backend", "cuda"]);
    assert_eq!(code, Some(6), "{text}");
    // None of them left a socket.
    assert!(sandbox.names().iter().all(|name| ["cut", "styles", "kiln.sock.lock"].contains(&&**name)), "{:?}", sandbox.names());
}

#[test]
fn a_socket_is_for_its_user() {
    let sandbox = Sandbox::new();
    let path = sandbox.path("run/kiln.sock");
    let flags = ["--socket", path.to_str().unwrap(), "--api-key-file", "keys"];
    fs::write(sandbox.path("keys"), "team:0123456789abcdef").unwrap();
    let command = serve(&sandbox, &flags);
    let server = Server::launch(sandbox, command);
    assert!(server.wait_for(", ready at ").contains(&format!("listening on {}\n", path.display())));
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    // Whoever reaches it may use it, by any name and without a key. Pages do not reach it.
    for host in ["kiln", "evil.example", "", "localhost:1"] {
        let answer = over(&path).ask("kiln", &Request::get("/v1/models").with("Host", host));
        assert_eq!(answer.status, 200, "{host:?}");
    }
    let mut connection = over(&path);
    connection.send(b"GET /v1/models HTTP/1.0\r\n\r\n");
    assert_eq!(connection.answer().status, 200);
    assert_eq!(server.get("/v1/models").status, 401);
    let generation = Request::json("/v1/images/generations", &small(&json!({"response_format": "url"})));
    let url = over(&path).ask("kiln.local", &generation).good().json()["data"][0]["url"].as_str().unwrap().to_owned();
    let id = url.strip_prefix("http://kiln.local").expect(&url);
    assert_eq!(server.get(id).good().header("content-type"), Some("image/png"));
    // Another server that was told to take it is refused, and the first goes on.
    let (code, told) = ends(serve(&server.sandbox, &flags));
    assert_eq!(code, Some(2), "{told}");
    assert!(told.starts_with("error: another server has this socket ("), "{told}");
    assert!(told.contains("hint: end it, or name another place with --socket"), "{told}");
    assert_eq!(over(&path).ask("kiln", &Request::get("/health")).status, 200);
    server.signal("-TERM");
    let folder = path.parent().unwrap().to_owned();
    let mut server = server;
    super::server::wait(&mut server.child);
    assert!(!path.exists() && folder.is_dir());
}

#[test]
fn the_usual_socket_belongs_to_the_first_server() {
    let sandbox = Sandbox::new();
    let runtime = sandbox.path("runtime");
    fs::create_dir(&runtime).unwrap();
    let command = || {
        let mut command = serve(&sandbox, &[]);
        command.env("XDG_RUNTIME_DIR", &runtime);
        command
    };
    let (first, second) = (command(), command());
    let path = runtime.join("kiln.sock");
    let first = Server::launch(Sandbox::new(), first);
    first.wait_for(", ready at ");
    let owner = fs::metadata(&path).unwrap().ino();
    let second = Server::launch(Sandbox::new(), second);
    let told = second.wait_for(", ready at ");
    assert!(told.contains("note: another server has this user's socket, so this one has none"), "{told}");
    assert_eq!(second.get("/health").status, 200);
    drop(second);
    assert_eq!(fs::metadata(&path).unwrap().ino(), owner);
    assert_eq!(over(&path).ask("kiln", &Request::get("/health")).status, 200);
    drop(first);
    // Without a folder for it, the socket is in the cache folder of kiln.
    let home = Sandbox::new();
    let command = serve(&home, &[]);
    let server = Server::launch(home, command);
    server.wait_for(", ready at ");
    let path = server.sandbox.path(".cache/kiln/run/kiln.sock");
    assert_eq!(over(&path).ask("kiln", &Request::get("/health")).status, 200);
    assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
    // A place that cannot be used is no reason to end, unless it was asked for.
    let blocked = Sandbox::new();
    fs::write(blocked.path("file"), "mine").unwrap();
    for name in ["file", "file/kiln.sock"] {
        let (code, told) = ends(serve(&blocked, &["--socket", blocked.path(name).to_str().unwrap()]));
        assert_eq!(code, Some(2), "{told}");
        assert_eq!(fs::read(blocked.path("file")).unwrap(), b"mine");
    }
    let mut usual = serve(&blocked, &[]);
    usual.env("XDG_RUNTIME_DIR", blocked.path("file"));
    let server = Server::launch(blocked, usual);
    assert!(server.wait_for(", ready at ").contains("warning: "), "{}", server.log());
}

/// A server that was killed leaves its socket behind, and the next one takes port and socket over.
#[test]
fn a_killed_server_is_started_again() {
    let sandbox = Sandbox::new();
    let path = sandbox.path("kiln.sock");
    let mut address = "127.0.0.1:0".to_owned();
    let mut images = Vec::new();
    for round in 0..2 {
        let command = serve(&sandbox, &["--socket", path.to_str().unwrap(), "--listen", &address]);
        let mut server = Server::launch(Sandbox::new(), command);
        server.wait_for(", ready at ");
        address = server.address.to_string();
        images.push(over(&path).ask("kiln", &Request::json("/v1/images/generations", &small(&json!({})))).good().image(0));
        assert!(server.get("/health").status == 200, "round {round}");
        // With an open connection, the port is the system's for a while.
        let _open = server.connect();
        let _work = server.occupy();
        server.child.kill().unwrap();
        server.child.wait().unwrap();
        assert!(path.exists(), "nobody was there to remove it");
    }
    assert!(images[0] == images[1]);
    // A socket of a program without a lock is that program's.
    fs::remove_file(&path).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    let (code, told) = ends(serve(&sandbox, &["--socket", path.to_str().unwrap()]));
    assert!(code == Some(2) && told.contains("another server has this socket"), "{told}");
}

#[test]
fn a_service_manager_hears_of_it() {
    let sandbox = Sandbox::new();
    let path = sandbox.path("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(common::http::PATIENCE)).unwrap();
    let mut command = serve(&sandbox, &without_socket(&[]));
    command.env("NOTIFY_SOCKET", &path);
    let server = Server::launch(Sandbox::new(), command);
    let told = || {
        let mut bytes = [0; 256];
        let count = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    };
    assert!(told().lines().any(|line| line == "READY=1"));
    assert_eq!(server.get("/ready").status, 200, "it says so when it is true");
    server.signal("-TERM");
    assert!(told().lines().any(|line| line == "STOPPING=1"));
    assert_eq!(server.end().0, Some(143));
    // A manager that is gone changes nothing.
    drop(manager);
    let mut command = serve(&sandbox, &without_socket(&[]));
    command.env("NOTIFY_SOCKET", &path);
    Server::launch(Sandbox::new(), command).wait_for(", ready at ");
}

/// The server writes no file, so a full disk is nothing to it. Neither is a log that cannot be written.
#[test]
fn it_writes_nothing() {
    let sandbox = Sandbox::new();
    let mut command = serve(&sandbox, &without_socket(&[]));
    // No file of more than no bytes can be written.
    let limited = {
        let mut shell = sandbox.wrapped("sh");
        shell.args(["-c", "ulimit -f 0 && exec \"$0\" \"$@\""]).arg(command.get_program()).args(command.get_args());
        shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        shell.env_remove("XDG_RUNTIME_DIR");
        shell
    };
    let server = Server::launch(sandbox, limited);
    server.wait_for(", ready at ");
    let files = [json!({}), json!({"response_format": "url"}), json!({"output_format": "webp", "n": 2}), json!({"n": 99})];
    let want = files.map(|fields| server.generate(&small(&fields)).status);
    assert_eq!(want, [200, 200, 200, 400]);
    assert_eq!(server.sandbox.names(), [""; 0]);
    drop(server);
    // Its own log on a full disk, and no folder to call home.
    let sandbox = Sandbox::new();
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    command = serve(&sandbox, &without_socket(&["--listen", &address.to_string()]));
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    command.env("HOME", "/dev/full").stderr(full).stdout(Stdio::null());
    let mut child = Ended(command.spawn().unwrap());
    let ask = |request: &Request| common::http::Connection::to(address).ask(&address.to_string(), request);
    super::server::eventually("it is ready", || {
        std::net::TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok()
            && ask(&Request::get("/ready")).status == 200
    });
    for _ in 0..2 {
        ask(&Request::json("/v1/images/generations", &small(&json!({})))).good();
    }
    assert_eq!(child.0.try_wait().unwrap(), None);
    assert_eq!(sandbox.names(), [""; 0]);
}

/// A process that ends with this value.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Arguments of this process are everyone's to read, so keys are none of them.
#[test]
fn no_flag_takes_a_key() {
    let help = Command::new(common::sandbox::program()).args(["serve", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let flags: Vec<&str> = help.lines().map(str::trim).filter(|line| line.starts_with("--") && line.contains("key")).collect();
    assert!(!flags.is_empty() && flags.iter().all(|line| line.starts_with("--api-key-file <FILE>")), "{flags:?}");
}
