//! `kiln serve`: its flags, and the server that they ask for.

use super::args::{DetailArg, ImageOptions, LoraArgs, ModelArgs, PromptArgs, RunArgs, within};
use super::generate::GenerateArgs;
use super::request::ImageRequest;
use super::{Process, Subcommand};
use crate::serve::{
    CONNECTIONS, CONNECTIONS_OF_ADDRESS, Config, EngineRequest, Keys, ServeRequest, WAITING, adapters_in, serve, tcp,
    usual_socket,
};
use clap::Args;
use kiln::error::{Error, Result};
use kiln::locate::Environment;
use kiln::lora::AdapterMode;
use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The end of `kiln serve --help`.
const EXAMPLES: &str = "\
Examples:
  kiln serve
      Answers at http://127.0.0.1:7878, for programs on this machine.

  curl -s http://127.0.0.1:7878/v1/images/generations -H 'Content-Type: application/json' \\
      -H 'Accept: image/png' -d '{\"prompt\": \"a large red star\", \"seed\": 7}' -o star.png
      An image by curl.

  OPENAI_BASE_URL=http://127.0.0.1:7878/v1 OPENAI_API_KEY=x python3 script.py
      A script that uses OpenAI's library.

  kiln serve --listen 0.0.0.0:7878 --api-key-file keys.txt
      Answers programs on other machines that have a key.";

/// The default port.
const PORT: u16 = 7878;

/// Answer requests of OpenAI's images API, with a model that is loaded once
///
/// Programs that speak OpenAI's API use the server by its address: `/v1/images/generations`, `/v1/images/edits` and `/v1/models`.
/// One image is made at a time. Clients take turns, and a client that leaves ends its work. SIGTERM and Ctrl-C end the server after the
/// images that it has accepted.
#[derive(Args, Debug)]
#[command(override_usage = "kiln serve [OPTIONS]", after_help = EXAMPLES)]
pub struct ServeArgs {
    /// Listen on this address and port [default: 127.0.0.1:7878]
    ///
    /// With port 0 kiln takes a free one and prints it. An address that other machines can reach needs --api-key-file.
    #[arg(long, value_name = "ADDR", value_parser = address, help_heading = "Server")]
    pub listen: Option<SocketAddr>,

    /// Listen on this Unix socket as well, or on `none`
    ///
    /// Only programs of the same user can use it. The default is kiln.sock in XDG_RUNTIME_DIR, or in the cache folder of kiln.
    #[arg(long, value_name = "PATH", help_heading = "Server")]
    pub socket: Option<PathBuf>,

    /// Require a key from this file, with a line `name:key` for each
    ///
    /// A key has at least 16 characters. Clients send it as OpenAI's libraries do: `Authorization: Bearer KEY`. The log has the name.
    /// A single key may also be in the variable KILN_API_KEY.
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    pub api_key_file: Option<PathBuf>,

    /// Let other machines in without a key
    #[arg(long, help_heading = "Server")]
    pub insecure: bool,

    /// Answer requests for this name, such as host.docker.internal
    ///
    /// A request names the server that it is for. kiln refuses names that it does not know, because a web page could make a name that leads
    /// here. NAME may have a port. May be given several times.
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    pub allow_host: Vec<String>,

    /// Let web pages of this origin use the server, such as https://app.example
    ///
    /// May be given several times.
    #[arg(long, value_name = "ORIGIN", value_parser = origin, help_heading = "Server")]
    pub allow_origin: Vec<String>,

    /// Use this address in URLs of images, such as https://images.example
    ///
    /// This is for servers behind a reverse proxy.
    #[arg(long, value_name = "URL", value_parser = origin, help_heading = "Server")]
    pub public_url: Option<String>,

    /// Offer the adapters in this folder to requests, by their file names
    ///
    /// A request names an adapter by its file name without `.safetensors`. kiln reads the folder once, when it starts.
    #[arg(long, value_name = "DIR", help_heading = "Server")]
    pub adapters: Option<PathBuf>,

    /// Let this many images wait at most
    #[arg(long, value_name = "N", value_parser = within(1usize..=10_000), default_value_t = WAITING, help_heading = "Server")]
    pub max_waiting: usize,

    /// Let one address hold this many connections at most
    ///
    /// Behind a reverse proxy all clients have the proxy's address.
    #[arg(long, value_name = "N", value_parser = within(1usize..=CONNECTIONS), default_value_t = CONNECTIONS_OF_ADDRESS, help_heading = "Server")]
    pub client_connections: usize,

    /// Choose what images say about how they were made
    ///
    /// `full` is everything that is needed to make an image again. `basic` has prompt and settings.
    #[arg(long, value_enum, value_name = "DETAIL", default_value = "full", help_heading = "Server")]
    pub metadata: DetailArg,

    /// Run the VAE in tiles, to bound its memory
    #[arg(long, help_heading = "Run")]
    pub vae_tiling: bool,

    /// Which model
    #[command(flatten)]
    pub model: ModelArgs,

    /// Adapters of the model
    #[command(flatten)]
    pub lora: LoraArgs,

    /// Where and how to compute
    #[command(flatten)]
    pub run: RunArgs,
}

/// Parses an address with a port, or a port alone.
fn address(text: &str) -> Result<SocketAddr, String> {
    let alone = text.strip_prefix(':').unwrap_or(text).parse().map(|port: u16| (Ipv4Addr::LOCALHOST, port).into());
    let host = || text.parse::<IpAddr>().map(|host| (host, PORT).into());
    let local = || {
        let port = text.strip_prefix("localhost").map(|port| port.strip_prefix(':').unwrap_or("7878"));
        port.and_then(|port| port.parse().ok()).map(|port: u16| (Ipv4Addr::LOCALHOST, port).into())
    };
    let parsed = alone.ok().or_else(|| text.parse().ok()).or_else(|| host().ok()).or_else(local);
    parsed.ok_or_else(|| "expected an address and a port, as in 127.0.0.1:7878 or [::1]:7878".into())
}

/// Parses a scheme and a host, which an origin is.
fn origin(text: &str) -> Result<String, String> {
    let text = text.strip_suffix('/').unwrap_or(text).to_ascii_lowercase();
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let is_host =
        |host: &str| !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte));
    match host.is_some_and(is_host) {
        true => Ok(text),
        false => Err("expected a scheme and a host, as in https://app.example".into()),
    }
}

impl Subcommand for ServeArgs {
    fn threads(&self) -> Option<usize> {
        self.run.threads
    }

    fn shares_pool(&self) -> bool {
        true
    }

    fn run(self: Box<Self>, Process { environment, signals, .. }: Process<'_>) -> Result<()> {
        let verbosity = self.run.verbosity();
        let terminal = Arc::new(signals.terminal(verbosity));
        let request = self.request(environment, terminal)?;
        serve(request, signals)
    }
}

impl ServeArgs {
    /// Checks the flags against each other and the system, and binds the address.
    fn request(self, environment: Environment, terminal: Arc<crate::terminal::Terminal>) -> Result<ServeRequest> {
        if self.run.trace.trace.is_some() {
            return Err(Error::usage("--trace is about a run that ends, and a server does not", "trace `kiln run`"));
        }
        let key = std::env::var("KILN_API_KEY").ok().filter(|key| !key.is_empty());
        let keys = Keys::new(self.api_key_file.as_deref(), key.as_deref())?;
        let address = self.listen.unwrap_or((Ipv4Addr::LOCALHOST, PORT).into());
        if !address.ip().is_loopback() && !keys.are_required() && !self.insecure {
            let what = format!("{address} can be reached from other machines, and there is no key");
            return Err(Error::usage(what, "add --api-key-file, or --insecure if everyone may use the server"));
        }
        let adapters = self.adapters.as_deref().map(adapters_in).transpose()?.unwrap_or_default();
        let prompt = PromptArgs { prompt: Some(OsString::new()), rest: Vec::new(), prompt_file: None };
        let image = ImageOptions { vae_tiling: self.vae_tiling, ..ImageOptions::default() };
        let (lora_partial, is_quiet) = (self.lora.lora_partial, self.run.quiet);
        let args = GenerateArgs::without_files(prompt, self.model, self.lora, image, None, self.run);
        let (usual, mut setup) = ImageRequest::from_args(&args, environment.clone(), &mut io::empty(), 0)?;
        // Any request may have images.
        setup.options.references = true;
        // Any request may have adapters. Merged weights could not change for them.
        if setup.options.adapters == AdapterMode::Auto && !adapters.is_empty() {
            setup.options.adapters = AdapterMode::Branch;
        }
        let socket = match self.socket {
            Some(path) if path == Path::new("none") => None,
            Some(path) => Some((path, true)),
            None => {
                let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()).map(PathBuf::from);
                usual_socket(runtime.as_deref(), environment.caches().as_deref()).map(|path| (path, false))
            }
        };
        let config = Config {
            keys,
            allowed_hosts: self.allow_host.iter().map(|host| host.to_ascii_lowercase()).collect(),
            allowed_origins: self.allow_origin,
            public_url: self.public_url,
            max_waiting: self.max_waiting,
            client_connections: self.client_connections,
            is_quiet,
        };
        let detail = self.metadata.into();
        let engine = EngineRequest { setup, usual, detail, halt: Arc::default(), terminal };
        // The last step, so that nobody is let in before all flags are checked.
        let listener = tcp(address)?;
        Ok(ServeRequest { config, engine, listener, socket, adapters, lora_partial, environment })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_may_be_short() {
        let of = |text: &str| address(text).map(|address| address.to_string()).ok();
        for (text, want) in [
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("[::1]:9", "[::1]:9"),
            ("0.0.0.0", "0.0.0.0:7878"),
            ("::1", "[::1]:7878"),
            ("9000", "127.0.0.1:9000"),
            (":0", "127.0.0.1:0"),
            ("localhost", "127.0.0.1:7878"),
            ("localhost:80", "127.0.0.1:80"),
        ] {
            assert_eq!(of(text).as_deref(), Some(want), "{text}");
        }
        for text in ["", "example.com:80", "127.0.0.1:", "127.0.0.1:70000", "localhost:x"] {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn origins_have_no_path() {
        assert_eq!(origin("https://App.example/").unwrap(), "https://app.example");
        assert_eq!(origin("http://[::1]:8080").unwrap(), "http://[::1]:8080");
        for text in ["", "app.example", "ftp://a", "https://", "https://a/b", "https://a?b", "https://a b", "null", "*"] {
            assert!(origin(text).is_err(), "{text}");
        }
    }
}
