//! A client of HTTP/1.1 over plain sockets. It sends what a test writes, byte for byte, and it is strict about answers.

use crate::sandbox::program;
use serde_json::Value;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

/// How long a client waits for bytes. No limit of the server is as long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The line between the parts of a form.
const BOUNDARY: &str = "kiln-test-boundary-7d1f";

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub target: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

/// A part of a form.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    Text(&'a str, &'a str),
    File(&'a str, &'a [u8]),
    /// A file with a name that the client chose.
    Named(&'a str, &'a str, &'a [u8]),
}

impl Request {
    pub fn new(method: &str, target: &str) -> Self {
        Self { method: method.into(), target: target.into(), headers: Vec::new(), body: Vec::new() }
    }

    pub fn get(target: &str) -> Self {
        Self::new("GET", target)
    }

    /// A request with a JSON body.
    pub fn json(target: &str, body: &Value) -> Self {
        let post = Self { body: body.to_string().into_bytes(), ..Self::new("POST", target) };
        post.with("Content-Type", "application/json")
    }

    /// A request with a form.
    pub fn form(target: &str, parts: &[Part<'_>]) -> Self {
        let post = Self { body: form(parts), ..Self::new("POST", target) };
        post.with("Content-Type", &format!("multipart/form-data; boundary={BOUNDARY}"))
    }

    /// Adds a header.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Replaces the body.
    pub fn with_body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// The bytes of the request. `Host` and `Content-Length` are added unless they are there.
    pub fn bytes(&self, host: &str) -> Vec<u8> {
        let has = |name: &str| self.headers.iter().any(|(other, _)| other.eq_ignore_ascii_case(name));
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.target);
        if !has("host") {
            head += &format!("Host: {host}\r\n");
        }
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        if !has("content-length") && !has("transfer-encoding") && (!self.body.is_empty() || self.method == "POST") {
            head += &format!("Content-Length: {}\r\n", self.body.len());
        }
        [head.as_bytes(), b"\r\n", &self.body].concat()
    }
}

/// The body of a form.
fn form(parts: &[Part<'_>]) -> Vec<u8> {
    let mut body = Vec::new();
    for part in parts {
        let (name, file, bytes) = match part {
            Part::Text(name, text) => (name, String::new(), text.as_bytes()),
            Part::File(name, bytes) => (name, "; filename=\"upload\"".into(), *bytes),
            Part::Named(name, file, bytes) => (name, format!("; filename=\"{file}\""), *bytes),
        };
        let kind = if file.is_empty() { "" } else { "Content-Type: application/octet-stream\r\n" };
        let head = format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n{kind}\r\n");
        body.extend_from_slice(&[head.as_bytes(), bytes, b"\r\n"].concat());
    }
    body.extend_from_slice(format!("--{BOUNDARY}--\r\n").as_bytes());
    body
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    /// The value of a header, which is there at most once.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(other, _)| other == name).map(|(_, value)| value.as_str());
        let first = found.next();
        assert_eq!(found.next(), None, "{name} is there twice");
        first
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// Expects success.
    pub fn good(self) -> Self {
        assert_eq!(self.status, 200, "{}", String::from_utf8_lossy(&self.body));
        self
    }

    /// The code of an error.
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().into()
    }

    /// The field that an error is about.
    pub fn param(&self) -> Option<String> {
        self.json()["error"]["param"].as_str().map(String::from)
    }

    pub fn message(&self) -> String {
        self.json()["error"]["message"].as_str().unwrap_or_default().into()
    }

    /// The file of an image in the answer.
    pub fn image(&self, index: usize) -> Vec<u8> {
        let text = self.json()["data"][index]["b64_json"].as_str().expect("an image in base64").to_owned();
        kiln::base64::decode(text.as_bytes()).expect("base64")
    }

    /// Checks what holds for every answer: what an error says, and what nobody learns from it.
    fn check(&self) {
        // A head that is no HTTP has no path, and its answer no body. A probe's answer is its status.
        let is_probe = self.body.starts_with(b"{\"status\":");
        if self.status < 400 || self.body.is_empty() || is_probe {
            return;
        }
        assert_eq!(self.header("content-type"), Some("application/json"), "{}", self.text());
        let body = self.json();
        let members: Vec<&String> = body["error"].as_object().expect("`error`").keys().collect();
        assert_eq!(members, ["code", "message", "param", "type"], "{body}");
        assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
        let error = &body["error"];
        let is_text = |name: &str| error[name].as_str().is_some_and(|text| !text.is_empty());
        assert!(is_text("code") && is_text("message") && is_text("type"), "{body}");
        assert!(error["param"].is_null() || error["param"].is_string(), "{body}");
        let id = self.header("x-request-id").unwrap_or_default();
        let is_id_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        assert!((1..=64).contains(&id.len()) && id.bytes().all(is_id_byte), "{id}");
        check_secrets(self.text());
        assert_eq!(self.header("retry-after").is_some(), matches!(self.status, 429 | 503), "{}: {body}", self.status);
    }
}

/// Checks that a text names no path of this machine and nothing of the program's inside.
pub fn check_secrets(text: &str) {
    let folder = Path::new(program()).parent().unwrap().to_string_lossy();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_string_lossy();
    for secret in [&*sources, &folder, "kiln-cli-", ".rs:", "panicked", "backtrace", "/.cargo/", "/rustc/"] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
    let is_address = |rest: &str| rest.chars().take_while(char::is_ascii_hexdigit).count() >= 6;
    assert!(!text.split("0x").skip(1).any(is_address), "{text}");
}

/// A connection to a server.
pub struct Connection<S = TcpStream> {
    pub stream: S,
    /// What was received and not read.
    buffer: Vec<u8>,
    /// The text of an event stream that was received and not read.
    events: String,
}

impl Connection {
    pub fn to(address: SocketAddr) -> Self {
        Self::try_to(address).unwrap()
    }

    pub fn try_to(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self::over(stream))
    }
}

impl<S: Read + Write> Connection<S> {
    /// A connection over a stream, which has time limits of its own.
    pub fn over(stream: S) -> Self {
        Self { stream, buffer: Vec::new(), events: String::new() }
    }

    /// Sends bytes. A server that has answered may take no more of them.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// Receives more bytes; `false` at the end.
    fn receive(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 1 << 16];
        let count = loop {
            match self.stream.read(&mut bytes) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        self.buffer.extend_from_slice(&bytes[..count]);
        Ok(count > 0)
    }

    /// Takes bytes up to an end, and the end.
    fn take_until(&mut self, end: &[u8]) -> io::Result<Vec<u8>> {
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|window| window == end) {
                let rest = self.buffer.split_off(at + end.len());
                let mut taken = std::mem::replace(&mut self.buffer, rest);
                taken.truncate(at);
                return Ok(taken);
            }
            if !self.receive()? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Takes this many bytes.
    fn take(&mut self, count: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() < count {
            if !self.receive()? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        let rest = self.buffer.split_off(count);
        Ok(std::mem::replace(&mut self.buffer, rest))
    }

    /// Reads the head of an answer, with an empty body.
    pub fn head(&mut self) -> io::Result<Answer> {
        let head = self.take_until(b"\r\n\r\n")?;
        let head = String::from_utf8(head).expect("a head in ASCII");
        let mut lines = head.split("\r\n");
        let first = lines.next().unwrap();
        let status = first.strip_prefix("HTTP/1.1 ").or_else(|| first.strip_prefix("HTTP/1.0 ")).expect(first);
        let headers = lines.map(|line| line.split_once(':').expect("a header"));
        Ok(Answer {
            status: status[..3].parse().expect(first),
            headers: headers.map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned())).collect(),
            body: Vec::new(),
        })
    }

    /// Reads a chunk of a body; empty at the end.
    fn chunk(&mut self) -> io::Result<Vec<u8>> {
        let line = self.take_until(b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&line).unwrap(), 16).expect("the size of a chunk");
        let chunk = self.take(size)?;
        assert_eq!(self.take(2)?, b"\r\n");
        Ok(chunk)
    }

    /// Reads an answer to a request of this method.
    pub fn answer_to(&mut self, method: &str) -> io::Result<Answer> {
        let mut answer = self.head()?;
        while answer.status < 200 {
            answer = self.head()?;
        }
        if method == "HEAD" || matches!(answer.status, 204 | 304) {
            return Ok(answer);
        }
        if answer.header("transfer-encoding") == Some("chunked") {
            loop {
                let chunk = self.chunk()?;
                if chunk.is_empty() {
                    break;
                }
                answer.body.extend(chunk);
            }
        } else if let Some(length) = answer.header("content-length") {
            answer.body = self.take(length.parse().unwrap())?;
        } else {
            while self.receive()? {}
            answer.body = std::mem::take(&mut self.buffer);
        }
        answer.check();
        Ok(answer)
    }

    /// Reads an answer.
    pub fn answer(&mut self) -> Answer {
        self.answer_to("GET").expect("an answer")
    }

    /// Sends a request and reads its answer.
    pub fn ask(&mut self, host: &str, request: &Request) -> Answer {
        self.send(&request.bytes(host));
        self.answer_to(&request.method).expect("an answer")
    }

    /// Reads the next event of a stream, whose head was read: its name and data. `None` at the end of the stream.
    pub fn event(&mut self) -> Option<(String, Value)> {
        self.try_event().expect("an event")
    }

    /// Like [`Connection::event`]; an error if the connection ends first.
    pub fn try_event(&mut self) -> io::Result<Option<(String, Value)>> {
        loop {
            if let Some(at) = self.events.find("\n\n") {
                let rest = self.events.split_off(at + 2);
                let frame = std::mem::replace(&mut self.events, rest);
                if frame.starts_with(':') {
                    continue;
                }
                let (name, data) = frame.trim_end().split_once('\n').expect("two lines");
                let (name, data) = (name.strip_prefix("event: ").unwrap(), data.strip_prefix("data: ").unwrap());
                return Ok(Some((name.into(), serde_json::from_str(data).expect("JSON"))));
            }
            let chunk = self.chunk()?;
            if chunk.is_empty() {
                assert_eq!(self.events, "", "whole events");
                return Ok(None);
            }
            self.events += std::str::from_utf8(&chunk).expect("whole characters");
        }
    }

    /// Whether the server closes the connection without another byte.
    pub fn is_closed(&mut self) -> bool {
        assert!(self.buffer.is_empty(), "{}", String::from_utf8_lossy(&self.buffer));
        match self.receive() {
            Ok(more) => !more,
            Err(error) => matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
        }
    }
}
