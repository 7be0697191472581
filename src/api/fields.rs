//! The fields of a request: members of a JSON object, or parts of a form. Both have the same names, and in a form numbers are text.

use super::{ApiError, ApiResult, Upload};
use crate::base64;
use crate::text::shown;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Limit on the nesting of JSON.
const MAX_DEPTH: usize = 16;

/// Limit on a part of a form that is text, in bytes.
const MAX_TEXT: usize = 64 << 10;

/// Limit on the parts of a form.
const MAX_PARTS: usize = 32;

/// The content of a form's part.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Text.
    Text(String),
    /// A file, whatever its name and type say.
    File(Vec<u8>),
}

/// A value as the client sent it.
#[derive(Debug)]
pub(super) enum Given {
    Json(Value),
    Text(String),
    File(Vec<u8>),
}

/// A field that was found, under the name that the client gave it.
pub(super) struct Field {
    pub name: String,
    pub value: Given,
}

/// The fields that nobody has taken yet.
pub(super) struct Fields(BTreeMap<String, Vec<Given>>);

impl Fields {
    /// Reads a JSON object. An absent member and one that is null are the same.
    pub fn of_json(body: &[u8]) -> ApiResult<Self> {
        let invalid = |why: &dyn Display| ApiError {
            param: None,
            ..ApiError::new("invalid_json", "", format!("the body is not JSON: {why}"))
        };
        check_depth(body).map_err(|why| invalid(&why))?;
        let value: Value = serde_json::from_slice(body).map_err(|error| invalid(&error))?;
        let Value::Object(members) = value else { return Err(invalid(&"expected an object")) };
        let given = members.into_iter().filter(|(_, value)| !value.is_null());
        Ok(Self(given.map(|(name, value)| (name, vec![Given::Json(value)])).collect()))
    }

    /// Takes the parts of a form, in order. `image[]` is another name of `image`: clients write it for lists, even of one.
    pub fn of_form(parts: Vec<(String, Part)>) -> ApiResult<Self> {
        if parts.len() > MAX_PARTS {
            return Err(ApiError {
                param: None,
                ..ApiError::new("invalid_value", "", format!("a form may have {MAX_PARTS} parts"))
            });
        }
        let mut fields: BTreeMap<String, Vec<Given>> = BTreeMap::new();
        for (name, part) in parts {
            let given = match part {
                Part::Text(text) if text.len() > MAX_TEXT => {
                    return Err(ApiError::new("invalid_value", &name, format!("text may have {MAX_TEXT} bytes")));
                }
                Part::Text(text) => Given::Text(text),
                Part::File(bytes) => Given::File(bytes),
            };
            fields.entry(name.strip_suffix("[]").unwrap_or(&name).to_owned()).or_default().push(given);
        }
        Ok(Self(fields))
    }

    /// The names that nobody has taken.
    pub fn rest(self) -> Vec<String> {
        self.0.into_keys().collect()
    }

    /// Takes a field by the first of its names that is there. Two names of one field are a contradiction, and so are two values.
    pub fn take(&mut self, names: &[&str]) -> ApiResult<Option<Field>> {
        let mut found = self.take_all(names)?.into_iter();
        let first = found.next();
        match found.next() {
            Some(second) => Err(ApiError::new("invalid_value", &second.name, "the field is there more than once")),
            None => Ok(first),
        }
    }

    /// Takes all values of a field, in order, under the first of its names that is there.
    pub fn take_all(&mut self, names: &[&str]) -> ApiResult<Vec<Field>> {
        let mut all = Vec::new();
        for name in names {
            let Some(values) = self.0.remove(*name) else { continue };
            if let Some(Field { name: other, .. }) = all.first() {
                return Err(ApiError::new("invalid_value", name, format!("`{other}` is the same field, and is there as well")));
            }
            all.extend(values.into_iter().map(|value| Field { name: (*name).into(), value }));
        }
        Ok(all)
    }

    /// Takes a text.
    pub fn text(&mut self, names: &[&str]) -> ApiResult<Option<String>> {
        self.take(names)?.map(Field::text).transpose()
    }

    /// Takes a whole number.
    pub fn whole<T: FromStr + PartialOrd + Display>(&mut self, names: &[&str], range: RangeInclusive<T>) -> ApiResult<Option<T>> {
        let Some(field) = self.take(names)? else { return Ok(None) };
        let value = field.digits().and_then(|text| text.parse().ok()).filter(|value| range.contains(value));
        let expected = || field.refused(&format!("expected a whole number from {} to {}", range.start(), range.end()));
        value.map(Some).ok_or_else(expected)
    }

    /// Takes a number.
    pub fn number(&mut self, names: &[&str], range: RangeInclusive<f32>) -> ApiResult<Option<f32>> {
        let Some(field) = self.take(names)? else { return Ok(None) };
        let value = field.digits().and_then(|text| text.parse().ok()).filter(|value| range.contains(value));
        let expected = || field.refused(&format!("expected a number from {} to {}", range.start(), range.end()));
        value.map(Some).ok_or_else(expected)
    }

    /// Takes a truth value.
    pub fn truth(&mut self, names: &[&str]) -> ApiResult<Option<bool>> {
        let Some(field) = self.take(names)? else { return Ok(None) };
        match &field.value {
            Given::Json(Value::Bool(value)) => Ok(Some(*value)),
            Given::Text(text) if text == "true" => Ok(Some(true)),
            Given::Text(text) if text == "false" => Ok(Some(false)),
            _ => Err(field.refused("expected true or false")),
        }
    }

    /// Takes one of several words.
    pub fn choice<T: Copy>(&mut self, names: &[&str], choices: &[(&str, T)]) -> ApiResult<Option<T>> {
        let Some(field) = self.take(names)? else { return Ok(None) };
        let found = field.words().and_then(|text| choices.iter().find(|(name, _)| *name == text));
        let words = || choices.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        match found {
            Some((_, value)) => Ok(Some(*value)),
            None => Err(ApiError { code: "unsupported_value", ..field.refused(&format!("expected one of {}", words())) }),
        }
    }

    /// Takes a value in the syntax of a type.
    pub fn parsed<T: FromStr<Err = crate::error::Error>>(&mut self, names: &[&str]) -> ApiResult<Option<T>> {
        let Some(field) = self.take(names)? else { return Ok(None) };
        let text = field.digits().or_else(|| field.words().map(String::from)).ok_or_else(|| field.refused("expected text"))?;
        text.parse().map(Some).map_err(|error| ApiError::of(&error, Some(&field.name)))
    }

    /// Takes images: files, data URLs, or lists of these.
    pub fn images(&mut self, names: &[&str], most: usize) -> ApiResult<Vec<Upload>> {
        self.list(names, most, "images", |value, place| image(value, place.into()))
    }

    /// Takes a list: values, or lists of values. `what` names several of them, and `read` gets each with its place.
    pub fn list<T>(
        &mut self,
        names: &[&str],
        most: usize,
        what: &str,
        read: impl Fn(Given, &str) -> ApiResult<T>,
    ) -> ApiResult<Vec<T>> {
        let mut all = Vec::new();
        for Field { name, value } in self.take_all(names)? {
            let values = match value {
                Given::Json(Value::Array(items)) => items.into_iter().map(Given::Json).collect(),
                one => vec![one],
            };
            for value in values {
                let place = format!("{name}[{}]", all.len());
                if all.len() == most {
                    return Err(ApiError::new("invalid_value", &place, format!("there may be {most} {what}")));
                }
                all.push(read(value, &place)?);
            }
        }
        Ok(all)
    }

    /// Takes a single image.
    pub fn image(&mut self, names: &[&str]) -> ApiResult<Option<Upload>> {
        self.take(names)?.map(|Field { name, value }| image(value, name)).transpose()
    }
}

impl Field {
    fn text(self) -> ApiResult<String> {
        match self.value {
            Given::Json(Value::String(text)) | Given::Text(text) => Ok(text),
            _ => Err(self.refused("expected text")),
        }
    }

    /// A text, if it is one.
    fn words(&self) -> Option<&str> {
        match &self.value {
            Given::Json(Value::String(text)) | Given::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A number as text: of JSON a number only, or a text of a form.
    fn digits(&self) -> Option<String> {
        match &self.value {
            Given::Json(Value::Number(number)) => Some(number.to_string()),
            Given::Text(text) => Some(text.clone()),
            _ => None,
        }
    }

    /// A whole number that a text may hold as well, because JavaScript's numbers end before seeds do.
    pub fn long_digits(&self) -> Option<String> {
        self.digits().or_else(|| self.words().map(String::from))
    }

    /// An error about the field.
    pub fn refused(&self, expected: &str) -> ApiError {
        let found = match &self.value {
            Given::Json(value) => shown(&value.to_string()),
            Given::Text(text) => shown(text),
            Given::File(_) => "a file".into(),
        };
        ApiError::new("invalid_value", &self.name, format!("{expected}, found {found}"))
    }
}

/// An image: a file, a data URL, bare base64, or an object with one of these.
fn image(value: Given, name: String) -> ApiResult<Upload> {
    let text = match value {
        Given::File(bytes) => return Ok(Upload { place: name, bytes }),
        Given::Json(Value::Object(mut members)) => match members.remove("image_url") {
            Some(Value::String(text)) => text,
            // The Chat API nests it once more.
            Some(Value::Object(mut inner)) => match inner.remove("url") {
                Some(Value::String(text)) => text,
                _ => return Err(ApiError::new("invalid_value", &name, "expected `image_url` to be a data URL")),
            },
            _ if members.contains_key("file_id") => return Err(remote(&name)),
            _ => return Err(ApiError::new("invalid_value", &name, "expected `image_url`, a data URL")),
        },
        Given::Json(Value::String(text)) | Given::Text(text) => text,
        Given::Json(_) => return Err(ApiError::new("invalid_value", &name, "expected a data URL")),
    };
    let is_remote = ["http:", "https:", "file:", "ftp:"]
        .iter()
        .any(|scheme| text.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme)));
    if is_remote {
        return Err(remote(&name));
    }
    let data = match text.strip_prefix("data:") {
        Some(url) => match url.split_once(',') {
            Some((kind, data)) if kind.ends_with(";base64") => data,
            _ => return Err(ApiError::new("invalid_value", &name, "expected a data URL in base64")),
        },
        None => &text,
    };
    match base64::decode(data.as_bytes()) {
        Some(bytes) => Ok(Upload { place: name, bytes }),
        None => Err(ApiError::new("invalid_image", &name, "this is not base64")),
    }
}

/// Nothing is fetched: whoever may send a request would choose what this machine connects to.
fn remote(name: &str) -> ApiError {
    ApiError::new("remote_images_not_supported", name, "images are sent in the request, as files or data URLs, and never fetched")
}

/// Refuses JSON that is nested too deeply, before anything is allocated for it.
fn check_depth(body: &[u8]) -> Result<(), String> {
    let (mut depth, mut quoted, mut escaped) = (0_usize, false, false);
    for byte in body {
        match (quoted, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => quoted = !quoted,
            (false, b'[' | b'{') => depth += 1,
            (false, b']' | b'}') => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(format!("it is nested more than {MAX_DEPTH} deep"));
        }
    }
    Ok(())
}
