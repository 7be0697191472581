//! Which requests are answered at all. A server on this machine is within reach of every page that a browser on it shows, so each request
//! says where it comes from: `Host` stops DNS rebinding, `Origin` and `Sec-Fetch-Site` stop other pages, and a key stops other people.

use super::Config;
use super::connection::Peer;
use super::route::Route;
use hyper::Method;
use hyper::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN};
use hyper::http::request::Parts;
use kiln::api::{ApiError, ApiResult};
use std::net::{IpAddr, SocketAddr};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Who sent a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The name of the key, if keys are required.
    pub key: Option<String>,
    /// The key of fair shares.
    pub share: String,
    /// Whether a browser asks on behalf of a page of an allowed origin what the page may send.
    pub is_preflight: bool,
    /// The name by which the client reached the server.
    pub host: Option<String>,
}

/// An error of a request that is refused.
fn refused(status: u16, code: &'static str, message: impl Into<String>) -> ApiError {
    ApiError { status, code, param: None, message: message.into() }
}

/// The only value of a header; an error if there are two.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> ApiResult<Option<&'a HeaderValue>> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (_, Some(_)) => Err(refused(400, "invalid_value", format!("there are two headers `{name}`"))),
        (value, None) => Ok(value),
    }
}

/// Lets a request in, or says why not.
pub fn check(config: &Config, peer: &Peer, parts: &Parts, route: Option<Route>) -> ApiResult<Caller> {
    let headers = &parts.headers;
    let host = single(headers, &HOST)?.map(|host| host.to_str().unwrap_or_default().to_ascii_lowercase());
    if let Peer::Address { local, .. } = peer {
        check_host(config, *local, host.as_deref())?;
    }
    check_origin(config, headers, host.as_deref())?;
    // A browser asks without the page's key.
    let is_preflight = parts.method == Method::OPTIONS && allowed_origin(config, headers).is_some();
    let is_open = is_preflight || route.is_some_and(Route::is_open);
    let key = match single(headers, &AUTHORIZATION)? {
        _ if !config.keys.are_required() || is_open || matches!(peer, Peer::Socket { .. }) => None,
        value => Some(key_of(config, value)?),
    };
    let share = match (&key, peer) {
        (Some(key), _) => format!("key {key}"),
        (None, Peer::Address { remote, .. }) => format!("address {remote}"),
        (None, Peer::Socket { uid }) => format!("user {uid}"),
    };
    Ok(Caller { key, share, is_preflight, host })
}

/// The name of the key of a header.
fn key_of(config: &Config, value: Option<&HeaderValue>) -> ApiResult<String> {
    let wrong = |message: &str| refused(401, "invalid_api_key", message);
    let value = value.ok_or_else(|| wrong("this server needs a key: send `Authorization: Bearer KEY`"))?.as_bytes();
    let (scheme, key) = value.split_at_checked(7).ok_or_else(|| wrong("expected `Authorization: Bearer KEY`"))?;
    if !scheme.eq_ignore_ascii_case(b"bearer ") {
        return Err(wrong("expected `Authorization: Bearer KEY`"));
    }
    config.keys.name_of(key).map(String::from).ok_or_else(|| wrong("this key is not one of the server's"))
}

/// Refuses a name that does not belong to this server. A page of another origin cannot choose this header, and a name that was made to
/// point here is not on the list.
fn check_host(config: &Config, local: SocketAddr, host: Option<&str>) -> ApiResult<()> {
    let host = host.ok_or_else(|| refused(400, "invalid_value", "there is no header `Host`"))?;
    let (name, port) = split_port(host);
    let port = port.map_or(Some(80), |port| port.parse().ok());
    let is_own_name = name == "localhost" || address(name).is_some_and(|ip| ip == local.ip() || is_this_machine(ip));
    let is_allowed = |allowed: &String| {
        let (other, other_port) = split_port(allowed);
        other == name && other_port.is_none_or(|other| other.parse().ok() == port)
    };
    if is_own_name && port == Some(local.port()) || config.allowed_hosts.iter().any(is_allowed) {
        return Ok(());
    }
    let what = "this server does not go by this name; `kiln serve --allow-host NAME` adds one";
    Err(refused(403, "host_not_allowed", what))
}

/// Whether an address is 127.0.0.1 or ::1.
fn is_this_machine(ip: IpAddr) -> bool {
    ip == IpAddr::from([127, 0, 0, 1]) || ip == IpAddr::V6(std::net::Ipv6Addr::LOCALHOST)
}

/// Name and port of a host.
pub fn split_port(host: &str) -> (&str, Option<&str>) {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, Some(port)),
        _ => (host, None),
    }
}

/// The address that a name spells.
fn address(name: &str) -> Option<IpAddr> {
    match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(name) => name.parse().ok().map(IpAddr::V6),
        None => name.parse().ok().map(IpAddr::V4),
    }
}

/// The origin of a request, if it is one that the user allows. Its pages may read the answer.
pub fn allowed_origin(config: &Config, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = single(headers, &ORIGIN).ok()??;
    config.allowed_origins.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes()).then(|| origin.clone())
}

/// Refuses requests that a page of another origin makes.
fn check_origin(config: &Config, headers: &HeaderMap, host: Option<&str>) -> ApiResult<()> {
    let no = |message: &str| refused(403, "origin_not_allowed", message);
    let origin = single(headers, &ORIGIN)?;
    if let Some(origin) = origin {
        if allowed_origin(config, headers).is_some() {
            return Ok(());
        }
        let text = origin.to_str().unwrap_or_default();
        let own = |scheme: &str| host.is_some_and(|host| text.strip_prefix(scheme) == Some(host));
        // Behind a reverse proxy the page's scheme is the proxy's.
        let public = config.public_url.as_deref().is_some_and(|url| url == text);
        if !own("http://") && !public {
            return Err(no("pages of other origins may not use this server; `kiln serve --allow-origin ORIGIN` lets one in"));
        }
        return Ok(());
    }
    match single(headers, &SEC_FETCH_SITE)?.map(HeaderValue::as_bytes) {
        None | Some(b"same-origin" | b"none") => Ok(()),
        Some(_) => Err(no("pages of other origins may not use this server")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::keys::Keys;
    use hyper::Request;

    fn config() -> Config {
        Config {
            allowed_hosts: vec!["host.docker.internal".into(), "box.lan:7878".into()],
            allowed_origins: vec!["https://app.example".into()],
            public_url: Some("https://images.example".into()),
            ..Config::for_tests()
        }
    }

    fn verdict(config: &Config, headers: &[(&str, &str)]) -> Result<Caller, u16> {
        let mut request = Request::builder().uri("/v1/models");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let peer = Peer::Address { remote: [10, 0, 0, 9].into(), local: "192.168.1.5:7878".parse().unwrap() };
        let parts = request.body(()).unwrap().into_parts().0;
        check(config, &peer, &parts, Some(Route::Models)).map_err(|error| error.status)
    }

    #[test]
    fn only_own_names_reach_the_server() {
        let config = config();
        for host in ["localhost:7878", "LOCALHOST:7878", "127.0.0.1:7878", "[::1]:7878", "192.168.1.5:7878", "box.lan:7878"] {
            assert!(verdict(&config, &[("host", host)]).is_ok(), "{host}");
        }
        assert!(verdict(&config, &[("host", "host.docker.internal:1")]).is_ok());
        for host in [
            "",
            "localhost",
            "localhost:80",
            "localhost.evil.com:7878",
            "evil.com:7878",
            "127.0.0.1.evil.com:7878",
            "127.0.0.2:7878",
            "0.0.0.0:7878",
            "2130706433:7878",
            "0x7f.1:7878",
            "[::]:7878",
            "[::ffff:127.0.0.1]:7878",
            "box.lan",
            "box.lan:99",
            "localhost:7878@evil.com",
            "evil.com#localhost:7878",
            "192.168.1.6:7878",
        ] {
            assert_eq!(verdict(&config, &[("host", host)]), Err(403), "{host}");
        }
        assert_eq!(verdict(&config, &[]), Err(400));
        assert_eq!(verdict(&config, &[("host", "localhost:7878"), ("host", "evil.com")]), Err(400));
    }

    #[test]
    fn pages_of_other_origins_are_refused() {
        let config = config();
        let with = |name: &str, value: &str| verdict(&config, &[("host", "localhost:7878"), (name, value)]);
        assert!(with("origin", "http://localhost:7878").is_ok() && with("origin", "https://images.example").is_ok());
        assert!(with("origin", "https://app.example").is_ok_and(|caller| !caller.is_preflight));
        for origin in [
            "null",
            "",
            "http://localhost",
            "http://localhost:7879",
            "https://localhost:7878",
            "http://127.0.0.1:7878",
            "http://evil.com",
            "https://app.example.evil.com",
            "https://app.example:444",
            "http://localhost:7878.evil.com",
        ] {
            assert_eq!(with("origin", origin), Err(403), "{origin}");
        }
        for (site, good) in [("same-origin", true), ("none", true), ("same-site", false), ("cross-site", false), ("x", false)] {
            assert_eq!(with("sec-fetch-site", site).is_ok(), good, "{site}");
        }
        // A program that is no browser says how it fetches, too.
        assert!(with("sec-fetch-mode", "cors").is_ok());
        let both = [("host", "localhost:7878"), ("origin", "https://app.example"), ("sec-fetch-site", "cross-site")];
        assert!(verdict(&config, &both).is_ok());
    }

    #[test]
    fn keys_are_asked_for() {
        let keys = Keys::new(None, Some("team:0123456789abcdef")).unwrap();
        let config = Config { keys, ..config() };
        let with = |key: &str| verdict(&config, &[("host", "localhost:7878"), ("authorization", key)]);
        let caller = with("Bearer 0123456789abcdef").unwrap();
        assert_eq!((caller.key.as_deref(), &*caller.share), (Some("team"), "key team"));
        assert!(with("bearer 0123456789abcdef").is_ok());
        for key in ["Bearer 0123456789abcdeF", "Bearer", "Bearer ", "Basic 0123456789abcdef", "0123456789abcdef", ""] {
            assert_eq!(with(key), Err(401), "{key}");
        }
        assert_eq!(verdict(&config, &[("host", "localhost:7878")]), Err(401));
        // A browser asks without a key, and only for a page of an allowed origin.
        let preflight = |origin: &str| {
            let request = Request::builder().method("OPTIONS").header("host", "localhost:7878").header("origin", origin);
            let peer = Peer::Address { remote: [10, 0, 0, 9].into(), local: "192.168.1.5:7878".parse().unwrap() };
            let parts = request.body(()).unwrap().into_parts().0;
            check(&config, &peer, &parts, Some(Route::Edits)).map(|caller| caller.is_preflight).map_err(|error| error.status)
        };
        assert_eq!(preflight("https://app.example"), Ok(true));
        assert_eq!((preflight("http://localhost:7878"), preflight("https://evil.example")), (Err(401), Err(403)));
        let twice = [("host", "localhost:7878"), ("authorization", "Bearer 0123456789abcdef"), ("authorization", "x")];
        assert_eq!(verdict(&config, &twice), Err(400));
    }
}
