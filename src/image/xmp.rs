//! XMP packets (ISO 16684-1): the text of an image as XML, for formats without text chunks.

use std::borrow::Cow;

/// A packet with one property for each text, in kiln's namespace. Characters that XML cannot hold, such as the bell, become U+FFFD.
pub(super) fn packet(text: &[(&str, String)]) -> String {
    let mut xml = String::from(
        "<?xpacket begin=\"\u{feff}\" id=\"W5M0MpCehiHzreSzNTczkc9d\"?>\n\
         <x:xmpmeta xmlns:x=\"adobe:ns:meta/\">\n\
         <rdf:RDF xmlns:rdf=\"http://www.w3.org/1999/02/22-rdf-syntax-ns#\">\n\
         <rdf:Description rdf:about=\"\" xmlns:kiln=\"urn:kiln:image/\">\n",
    );
    for (key, value) in text {
        xml.push_str(&format!("<kiln:{key}>"));
        value.chars().for_each(|c| push_escaped(c, &mut xml));
        xml.push_str(&format!("</kiln:{key}>\n"));
    }
    xml.push_str("</rdf:Description>\n</rdf:RDF>\n</x:xmpmeta>\n<?xpacket end=\"r\"?>");
    xml
}

fn push_escaped(c: char, xml: &mut String) {
    match c {
        '&' => xml.push_str("&amp;"),
        '<' => xml.push_str("&lt;"),
        '>' => xml.push_str("&gt;"),
        // Quotes as well: some readers look for properties without parsing the XML, and text must not pass for one.
        '"' => xml.push_str("&quot;"),
        '\'' => xml.push_str("&apos;"),
        // An XML parser would turn a carriage return into a newline.
        '\r' => xml.push_str("&#13;"),
        '\t' | '\n' => xml.push(c),
        '\0'..' ' | '\u{fffe}' | '\u{ffff}' => xml.push('\u{fffd}'),
        _ => xml.push(c),
    }
}

/// Hands the names and values of properties in kiln's namespace to `each`. They are elements or attributes: other programs turn one into the
/// other. The XML around them is not parsed. Reading ends where a property is not well-formed.
pub(crate) fn properties<'a>(packet: &'a str, each: &mut dyn FnMut(&'a str, Cow<'a, str>)) {
    const PREFIX: &str = "kiln:";
    let mut rest = packet;
    while let Some(at) = rest.find(PREFIX) {
        let before = rest[..at].chars().next_back();
        rest = &rest[at + PREFIX.len()..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        rest = after;
        let value = match before {
            Some('<') => after.strip_prefix('>').and_then(|after| {
                let (value, closing) = after.split_once("</")?;
                let closing = closing.strip_prefix(PREFIX)?.strip_prefix(name)?.strip_prefix('>')?;
                (!value.contains('<')).then_some((value, closing))
            }),
            Some(c) if c.is_ascii_whitespace() => after
                .strip_prefix("=\"")
                .and_then(|after| after.split_once('"'))
                .or_else(|| after.strip_prefix("='").and_then(|after| after.split_once('\''))),
            // The name of something else.
            _ => continue,
        };
        let Some((value, after)) = value else { break };
        each(name, unescaped(value));
        rest = after;
    }
}

/// A value without escapes. XML's five entities and numbers are known, and nothing else is replaced.
fn unescaped(value: &str) -> Cow<'_, str> {
    if !value.contains('&') {
        return value.into();
    }
    let (mut text, mut rest) = (String::with_capacity(value.len()), value);
    while let Some((before, after)) = rest.split_once('&') {
        text.push_str(before);
        // The longest is `&#1114111;`.
        let entity = after.bytes().take(10).position(|byte| byte == b';').and_then(|end| Some((character(&after[..end])?, end)));
        rest = match entity {
            Some((c, end)) => {
                text.push(c);
                &after[end + 1..]
            }
            None => {
                text.push('&');
                after
            }
        };
    }
    (text + rest).into()
}

/// The character that an entity stands for.
fn character(entity: &str) -> Option<char> {
    let number = |digits: &str, radix| u32::from_str_radix(digits, radix).ok().and_then(char::from_u32);
    match entity {
        "amp" => Some('&'),
        "lt" => Some('<'),
        "gt" => Some('>'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        _ => match entity.strip_prefix('#')? {
            hexadecimal if hexadecimal.starts_with('x') => number(&hexadecimal[1..], 16),
            decimal => number(decimal, 10),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let text = [("prompt", "a <b> & \"c\" 'd'\r\n\u{7} 你好 tiff:Orientation=\"6\"".to_owned()), ("seed", "7".into())];
        let xml = packet(&text);
        let escaped = "a &lt;b&gt; &amp; &quot;c&quot; &apos;d&apos;&#13;\n\u{fffd} 你好 tiff:Orientation=&quot;6&quot;";
        assert!(xml.contains(&format!("<kiln:prompt>{escaped}</kiln:prompt>\n<kiln:seed>7</kiln:seed>\n")), "{xml}");
    }

    fn all(packet: &str) -> Vec<(&str, Cow<'_, str>)> {
        let mut found = Vec::new();
        properties(packet, &mut |name, value| found.push((name, value)));
        found
    }

    #[test]
    fn properties_read_back() {
        let prompt = "a <b> & \"c\" 'd'\r\n &amp; </kiln:prompt> kiln:seed=\"9\" 你好";
        let text = [("prompt", prompt.to_owned()), ("seed", "7".into()), ("lora-sha256", String::new())];
        let xml = packet(&text);
        let found = all(&xml);
        assert_eq!(found, [("prompt", prompt.into()), ("seed", "7".into()), ("lora-sha256", "".into())]);
        let attributes =
            "<rdf:Description xmlns:kiln=\"urn:kiln:image/\" kiln:seed='7'\n kiln:prompt=\"a &lt;b&gt; &#x1f98a;&#65;\"/>";
        assert_eq!(all(attributes), [("seed", Cow::from("7")), ("prompt", "a <b> 🦊A".into())]);
    }

    #[test]
    fn what_is_not_well_formed_is_left_out() {
        for (xml, want) in [
            ("", 0),
            ("<kiln:a>1</kiln:a><kiln:b>2", 1),
            ("<kiln:a>1</kiln:b><kiln:c>2</kiln:c>", 0),
            ("<kiln:a><b>1</b></kiln:a>", 0),
            ("<kiln:a>1", 0),
            (" kiln:a=\"1", 0),
            ("<kiln:a/><kiln:b>2</kiln:b>", 0),
            ("mykiln:a=\"1\"", 0),
        ] {
            assert_eq!(all(xml).len(), want, "{xml}");
        }
        let entities = "&nbsp;&lol;&#xD800;&#99999999999;&;& &#x110000; é&é";
        assert_eq!(unescaped(entities), entities, "no other entity is replaced");
    }
}
