//! Crockford's base 32: digits and letters without I, L, O and U, which people confuse. Decoding
//! accepts both cases, and the confused letters as the digits that they resemble.

const ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";

/// Encodes `bytes`: 8 characters for 5 bytes. Unused bits of the last character are 0.
pub fn encode(bytes: &[u8]) -> String {
    let (mut text, mut bits, mut held) = (String::new(), 0u32, 0);
    for byte in bytes {
        bits = bits << 8 | u32::from(*byte);
        held += 8;
        while held >= 5 {
            held -= 5;
            text.push(char::from(ALPHABET[(bits >> held & 31) as usize]));
        }
    }
    if held > 0 {
        text.push(char::from(ALPHABET[(bits << (5 - held) & 31) as usize]));
    }
    text
}

/// Decodes the whole bytes of a text. `None` if a character is not in the alphabet, or if bits
/// after the last whole byte are not 0. So each text has one value, and each value one text.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let (mut bytes, mut bits, mut held) = (Vec::with_capacity(text.len() * 5 / 8), 0u32, 0);
    for letter in text.bytes() {
        bits = bits << 5 | u32::from(value(letter)?);
        held += 5;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    (held < 5 && bits & ((1 << held) - 1) == 0).then_some(bytes)
}

/// The text in the alphabet's own letters; `None` if a character is not in the alphabet.
pub fn canonical(text: &str) -> Option<String> {
    text.bytes().map(|letter| Some(char::from(ALPHABET[usize::from(value(letter)?)]))).collect()
}

fn value(letter: u8) -> Option<u8> {
    let letter = match letter.to_ascii_uppercase() {
        b'O' => b'0',
        b'I' | b'L' => b'1',
        letter => letter,
    };
    ALPHABET.iter().position(|known| *known == letter).map(|index| index as u8)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let text = encode(&bytes);
            prop_assert_eq!(decode(&text).unwrap(), bytes.clone());
            prop_assert_eq!(decode(&text.to_ascii_lowercase()).unwrap(), bytes);
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".{0,40}") {
            if let Some(bytes) = decode(&text) {
                prop_assert_eq!(Some(encode(&bytes)), canonical(&text));
            }
        }
    }

    #[test]
    fn confused_letters_are_the_digits() {
        assert_eq!(canonical("oOiIlL8z").unwrap(), "0011118Z");
        assert_eq!(canonical("U"), None);
    }
}
