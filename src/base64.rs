//! Base64 (RFC 4648), in which terminals and JSON take binary data.

/// The digits.
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// No digit.
const NONE: u8 = 64;

/// The value of each digit.
const VALUES: [u8; 256] = {
    let mut values = [NONE; 256];
    let mut value = 0;
    while value < DIGITS.len() {
        values[DIGITS[value] as usize] = value as u8;
        value += 1;
    }
    values
};

/// Encodes bytes, with padding.
pub fn encode(bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |i: usize| u32::from(group.get(i).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        let digit = |i: usize| if i > group.len() { b'=' } else { DIGITS[(bits >> (18 - 6 * i) & 63) as usize] };
        text.extend((0..4).map(digit));
    }
    text
}

/// Decodes a text with or without padding. Nothing else may be in it, and unused bits are zero, so a text has one meaning.
pub fn decode(text: &[u8]) -> Option<Vec<u8>> {
    let digits = match text {
        [rest @ .., b'=', b'='] | [rest @ .., b'='] if text.len().is_multiple_of(4) => rest,
        _ => text,
    };
    let mut bytes = Vec::with_capacity(digits.len() / 4 * 3 + 3);
    for group in digits.chunks(4) {
        let mut bits = 0;
        for digit in group {
            let value = VALUES[usize::from(*digit)];
            if value == NONE {
                return None;
            }
            bits = bits << 6 | u32::from(value);
        }
        // Two digits are a byte, three are two.
        let used = match group.len() {
            4 => 3,
            3 => 2,
            2 => 1,
            _ => return None,
        };
        let aligned = bits << (6 * (4 - group.len()));
        let [_, all @ ..] = aligned.to_be_bytes();
        if all[used..].iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend(&all[..used]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vectors_of_the_standard() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(encode(bytes.as_bytes()), text.as_bytes());
            assert_eq!(decode(text.as_bytes()).as_deref(), Some(bytes.as_bytes()));
            assert_eq!(decode(text.trim_end_matches('=').as_bytes()).as_deref(), Some(bytes.as_bytes()));
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
        assert_eq!(encode(&[0xFB, 0xFF]), b"+/8=");
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["Z", "Zg=", "Zg===", "=", "====", "Z===", "Zm9v\n", " Zm9v", "Zm-_", "Zh==", "Zm9=", "Zg==Zg==", "Zm9vYg==="]
        {
            assert_eq!(decode(text.as_bytes()), None, "{text}");
        }
    }
}
