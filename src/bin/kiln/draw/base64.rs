//! Base64, with which terminals take binary data.

/// The digits.
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

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

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Decodes what [`encode`] wrote.
    pub fn decode(text: &[u8]) -> Vec<u8> {
        assert_eq!(text.len() % 4, 0);
        let mut bytes = Vec::new();
        for group in text.chunks(4) {
            let digits = group.iter().filter(|&&c| c != b'=');
            let value = |c: u8| DIGITS.iter().position(|&digit| digit == c).unwrap() as u32;
            let bits = digits.clone().fold(0, |bits, &c| bits << 6 | value(c)) << (6 * (4 - digits.clone().count()));
            bytes.extend(&bits.to_be_bytes()[1..digits.count()]);
        }
        bytes
    }

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
            assert_eq!(decode(text.as_bytes()), bytes.as_bytes());
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), all);
        assert_eq!(encode(&[0xFB, 0xFF]), b"+/8=");
    }
}
