//! Metadata of a GGUF file: named values. Texts and lists stay where they are in the file.

use std::collections::BTreeMap;
use std::ops::Range;

/// The type of a value or of a list's items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    List,
    U64,
    I64,
    F64,
}

impl Kind {
    /// The type with this number in a file.
    pub fn from_number(number: u32) -> Option<Self> {
        use Kind::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, Text, List, U64, I64, F64].get(number as usize).copied()
    }

    /// Bytes of a value; `None` if they differ from value to value.
    pub const fn bytes(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::List => None,
        }
    }
}

/// A value. Ranges are bytes of the file.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(Range<usize>),
    List(List),
}

/// A list: its items follow each other.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct List {
    pub kind: Kind,
    pub count: usize,
    pub bytes: Range<usize>,
}

impl Value {
    /// A value of fixed size. `bytes` has that size.
    pub fn number(kind: Kind, bytes: &[u8]) -> Option<Self> {
        let mut wide = [0; 8];
        wide.get_mut(..bytes.len())?.copy_from_slice(bytes);
        let bits = u64::from_le_bytes(wide);
        // Moves the sign to the top and back.
        let signed = |bytes: u32| ((bits << (64 - 8 * bytes)) as i64) >> (64 - 8 * bytes);
        Some(match kind {
            Kind::U8 | Kind::U16 | Kind::U32 | Kind::U64 => Self::Unsigned(bits),
            Kind::I8 => Self::Signed(signed(1)),
            Kind::I16 => Self::Signed(signed(2)),
            Kind::I32 => Self::Signed(signed(4)),
            Kind::I64 => Self::Signed(signed(8)),
            Kind::F32 => Self::Float(f64::from(f32::from_bits(bits as u32))),
            Kind::F64 => Self::Float(f64::from_bits(bits)),
            Kind::Bool => Self::Bool(bits != 0),
            Kind::Text | Kind::List => return None,
        })
    }

    /// The value for an error text.
    pub fn describe(&self) -> String {
        match self {
            Self::Unsigned(number) => number.to_string(),
            Self::Signed(number) => number.to_string(),
            Self::Float(number) => number.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::Text(_) => "a text".into(),
            Self::List(list) => format!("a list of {}", list.count),
        }
    }
}

/// The metadata of a file, with the file's bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Metadata<'a> {
    pub values: &'a BTreeMap<String, Value>,
    pub file: &'a [u8],
}

impl<'a> Metadata<'a> {
    /// A value of another type than asked for is an error that names the key.
    fn typed<T>(
        self,
        key: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| format!("{key} is {}, not {wanted}", value.describe()))
    }

    /// A text, which must be UTF-8.
    pub fn text(self, key: &str) -> Result<Option<&'a str>, String> {
        self.typed(key, "a text in UTF-8", |value| match value {
            Value::Text(range) => std::str::from_utf8(self.file.get(range.clone())?).ok(),
            _ => None,
        })
    }

    /// A whole number of at least 0.
    pub fn unsigned(self, key: &str) -> Result<Option<u64>, String> {
        self.typed(key, "a whole number of at least 0", whole)
    }

    /// A whole number of at least 0. A list of equal numbers, one for each layer, counts as that
    /// number.
    pub fn same_everywhere(self, key: &str) -> Result<Option<u64>, String> {
        let Some(Value::List(_)) = self.values.get(key) else { return self.unsigned(key) };
        let mut numbers = self.numbers(key)?.into_iter().flatten();
        let first = numbers.next();
        match first.as_ref().and_then(whole) {
            Some(number) if numbers.all(|other| Some(&other) == first.as_ref()) => Ok(Some(number)),
            _ => Err(format!("{key} differs from layer to layer, which is not supported")),
        }
    }

    /// A finite number of any kind.
    pub fn float(self, key: &str) -> Result<Option<f64>, String> {
        self.typed(key, "a finite number", |value| match value {
            Value::Float(number) if number.is_finite() => Some(*number),
            Value::Unsigned(number) => Some(*number as f64),
            Value::Signed(number) => Some(*number as f64),
            _ => None,
        })
    }

    /// True or false.
    pub fn bool(self, key: &str) -> Result<Option<bool>, String> {
        self.typed(key, "true or false", |value| match value {
            Value::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// A list of texts, which must be UTF-8.
    pub fn texts(self, key: &str) -> Result<Option<Vec<&'a str>>, String> {
        let Some(list) = self.list(key, "texts", |kind| kind == Kind::Text)? else { return Ok(None) };
        let mut bytes = self.file.get(list.bytes.clone()).unwrap_or_default();
        let mut texts = Vec::with_capacity(list.count);
        for index in 0..list.count {
            let text = bytes.split_first_chunk::<8>().and_then(|(len, rest)| {
                rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)
            });
            let Some((text, rest)) = text else { return Err(format!("{key} ends inside of item {index}")) };
            let text = std::str::from_utf8(text).map_err(|_| format!("{key}: item {index} is not UTF-8"))?;
            texts.push(text);
            bytes = rest;
        }
        Ok(Some(texts))
    }

    /// A list of numbers, which are read one by one.
    pub fn numbers(self, key: &str) -> Result<Option<impl ExactSizeIterator<Item = Value> + 'a>, String> {
        let Some(list) = self.list(key, "numbers", |kind| kind.bytes().is_some())? else { return Ok(None) };
        let bytes = self.file.get(list.bytes.clone()).unwrap_or_default();
        let items = bytes.chunks_exact(list.kind.bytes().unwrap_or(1));
        Ok(Some(items.map(|item| Value::number(list.kind, item).unwrap_or(Value::Unsigned(0)))))
    }

    fn list(
        self,
        key: &str,
        items: &str,
        is_wanted: impl Fn(Kind) -> bool,
    ) -> Result<Option<&'a List>, String> {
        self.typed(key, &format!("a list of {items}"), |value| match value {
            Value::List(list) if is_wanted(list.kind) => Some(list),
            _ => None,
        })
    }
}

/// A whole number of at least 0.
pub(super) fn whole(value: &Value) -> Option<u64> {
    match value {
        Value::Unsigned(number) => Some(*number),
        Value::Signed(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}
