//! Byte pairs from the `model` of a tokenizer.json, without a copy of its large parts.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::{Bpe, Merges, Pairs, Rule, Vocabulary};

/// The `model` of a tokenizer.json, its large parts as text.
#[derive(Deserialize)]
struct File<'a> {
    r#type: Option<String>,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    #[serde(borrow)]
    vocab: Option<&'a RawValue>,
    #[serde(borrow)]
    merges: Option<&'a RawValue>,
}

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&RawValue>::deserialize(deserializer)?.get();
        let library = || Ok(Self::Library(serde_json::from_str(text).map_err(D::Error::custom)?));
        let Ok(file) = serde_json::from_str::<File<'de>>(text) else { return library() };
        let (Some("BPE"), Some(vocab), Some(merges)) = (file.r#type.as_deref(), file.vocab, file.merges)
        else {
            return library();
        };
        let affix = |affix: Option<String>| affix.is_some_and(|affix| !affix.is_empty());
        if file.dropout.is_some_and(|p| p != 0.0)
            || affix(file.continuing_subword_prefix)
            || affix(file.end_of_word_suffix)
        {
            return library();
        }
        let Entries(vocabulary) = serde_json::from_str(vocab.get()).map_err(D::Error::custom)?;
        let byte = |byte: u8| vocabulary.id(&format!("<0x{byte:02X}>"));
        let bytes =
            if file.byte_fallback == Some(true) { (0..=255).map_while(byte).collect() } else { Vec::new() };
        // Without a token for every byte, some characters would be unknown.
        if file.unk_token.is_some() && bytes.len() < 256 || !matches!(bytes.len(), 0 | 256) {
            return library();
        }
        let mut deserializer = serde_json::Deserializer::from_str(merges.get());
        let merges = List(&vocabulary).deserialize(&mut deserializer).map_err(D::Error::custom)?;
        let whole_first = file.ignore_merges == Some(true);
        let (merges, specials) = (Rule::Listed(merges), Vec::new());
        Ok(Self::Bpe(Box::new(Bpe { vocabulary, merges, specials, bytes, whole_first })))
    }
}

/// A string that is borrowed from the file if possible.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// `{"text": id, …}`.
struct Entries(Vocabulary);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tokens to ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut vocabulary = Vocabulary::default();
                while let Some((Text(text), id)) = map.next_entry::<Text<'de>, u32>()? {
                    vocabulary.insert(&text, id).map_err(A::Error::custom)?;
                }
                Ok(Entries(vocabulary))
            }
        }
        deserializer.deserialize_map(Map)
    }
}

/// `[["a", "b"], …]`, or `["a b", …]` in older files.
struct List<'a>(&'a Vocabulary);

impl<'de> DeserializeSeed<'de> for List<'_> {
    type Value = Merges;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Merges, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for List<'_> {
    type Value = Merges;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of merges")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merges, A::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Merge<'a> {
            Pair(#[serde(borrow)] Text<'a>, #[serde(borrow)] Text<'a>),
            Line(#[serde(borrow)] Text<'a>),
        }
        let mut merges = Merges::default();
        let mut both = String::new();
        while let Some(merge) = list.next_element::<Merge<'de>>()? {
            let (left, right) = match &merge {
                Merge::Pair(Text(left), Text(right)) => (&**left, &**right),
                Merge::Line(Text(line)) if line.starts_with("#version") => continue,
                Merge::Line(Text(line)) => line
                    .split_once(' ')
                    .filter(|(_, right)| !right.contains(' '))
                    .ok_or_else(|| A::Error::custom(format!("the merge {line:?} is not two tokens")))?,
            };
            let id = |text: &str| {
                let missing =
                    || A::Error::custom(format!("the merges hold {text:?}, the vocabulary does not"));
                self.0.id(text).ok_or_else(missing)
            };
            both.clear();
            both.extend([left, right]);
            merges.push(id(left)?, id(right)?, id(&both)?);
        }
        Ok(merges)
    }
}
