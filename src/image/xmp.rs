//! XMP packets (ISO 16684-1): the text of an image as XML, for formats without text chunks.

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
}
