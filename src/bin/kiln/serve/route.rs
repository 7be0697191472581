//! The routes, in one table. A path matches as it is spelled: nothing is decoded, and no `..` means anything.

use hyper::Method;

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    Generations,
    Edits,
    Models,
    Model,
    Image,
    Status,
    Health,
    Ready,
    Metrics,
    OpenApi,
    Index,
}

/// A row of the table.
pub struct Row {
    pub route: Route,
    pub method: Method,
    /// The path. A final `{id}` stands for one segment that is not empty.
    pub path: &'static str,
    /// The name in metrics and in the log.
    pub name: &'static str,
    /// Whether it is answered without a key.
    pub is_open: bool,
}

/// All routes. The three kinds of OpenAI's are also there without `/v1`, because people set base URLs both ways.
pub const ROUTES: &[Row] = &[
    row(Route::Generations, Method::POST, "/v1/images/generations", "generations", false),
    row(Route::Generations, Method::POST, "/images/generations", "generations", false),
    row(Route::Edits, Method::POST, "/v1/images/edits", "edits", false),
    row(Route::Edits, Method::POST, "/images/edits", "edits", false),
    row(Route::Models, Method::GET, "/v1/models", "models", false),
    row(Route::Models, Method::GET, "/models", "models", false),
    row(Route::Model, Method::GET, "/v1/models/{id}", "model", false),
    row(Route::Model, Method::GET, "/models/{id}", "model", false),
    // The random id is the permission.
    row(Route::Image, Method::GET, "/v1/images/{id}", "image", true),
    row(Route::Status, Method::GET, "/kiln/status", "status", false),
    row(Route::Health, Method::GET, "/health", "health", true),
    row(Route::Ready, Method::GET, "/ready", "ready", true),
    row(Route::Metrics, Method::GET, "/metrics", "metrics", false),
    row(Route::OpenApi, Method::GET, "/openapi.json", "openapi", false),
    row(Route::Index, Method::GET, "/", "index", true),
];

const fn row(route: Route, method: Method, path: &'static str, name: &'static str, is_open: bool) -> Row {
    Row { route, method, path, name, is_open }
}

impl Route {
    /// The first row of a route.
    fn row(self) -> Option<&'static Row> {
        ROUTES.iter().find(|row| row.route == self)
    }

    /// Whether the route is answered without a key.
    pub fn is_open(self) -> bool {
        self.row().is_some_and(|row| row.is_open)
    }

    /// Whether programs ask for it all the time, to see how the server is.
    pub fn is_probe(self) -> bool {
        matches!(self, Self::Health | Self::Ready | Self::Metrics | Self::Status)
    }

    /// The name in metrics and in the log.
    pub fn name(self) -> &'static str {
        self.row().map_or("", |row| row.name)
    }

    /// The method that the route takes. `HEAD` goes wherever `GET` does.
    pub fn method(self) -> Method {
        self.row().map_or(Method::GET, |row| row.method.clone())
    }
}

/// The route of a path, and the id in it.
pub fn find(path: &str) -> Option<(Route, &str)> {
    // A fixed path comes before a pattern.
    let fixed = ROUTES.iter().find(|row| row.path == path).map(|row| (row.route, ""));
    fixed.or_else(|| {
        ROUTES.iter().find_map(|row| {
            let id = path.strip_prefix(row.path.strip_suffix("{id}")?)?;
            (!id.is_empty() && !id.contains('/')).then_some((row.route, id))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_match_as_they_are_spelled() {
        assert_eq!(find("/v1/images/edits"), Some((Route::Edits, "")));
        assert_eq!(find("/images/generations"), Some((Route::Generations, "")));
        assert_eq!(find("/v1/images/0af3"), Some((Route::Image, "0af3")));
        assert_eq!(find("/models/x"), Some((Route::Model, "x")));
        for path in [
            "",
            "//",
            "/v1",
            "/v1/",
            "/V1/models",
            "/v1/models/",
            "/v1/models/a/b",
            "//health",
            "/health/",
            "/%68ealth",
            "/./health",
        ] {
            assert_eq!(find(path), None, "{path}");
        }
        assert_eq!(find("/v1/images/variations").map(|(route, _)| route), Some(Route::Image));
    }
}
