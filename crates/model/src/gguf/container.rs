//! The header of one GGUF file: metadata and a table of tensors. All counts, lengths and places are
//! checked against the file's length before anything is made of them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::types::TensorType;
use super::values::{Kind, List, Value};

/// Where tensors begin, in multiples of this, if the metadata does not say.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Dimensions of a tensor at most.
const MAX_DIMENSIONS: u32 = 4;
/// Lists in lists at most. Known keys have no list of lists at all.
const MAX_DEPTH: usize = 4;
/// Bytes of a name at most, as the format says of keys.
const MAX_NAME_BYTES: usize = (1 << 16) - 1;

/// The header of a file.
#[derive(Debug)]
pub(super) struct Header {
    pub values: BTreeMap<String, Value>,
    pub tensors: BTreeMap<String, TensorInfo>,
    /// Its bytes.
    pub bytes: usize,
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorInfo {
    /// The innermost first: columns, rows, matrices.
    pub dimensions: Vec<usize>,
    pub kind: TensorType,
    /// Its bytes in the file.
    pub bytes: Range<usize>,
}

/// Why a header cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// What is wrong.
    Malformed(String),
    /// The file ends before a tensor does: the length that it should have.
    Truncated(u64),
}

impl From<String> for Fault {
    fn from(reason: String) -> Self {
        Self::Malformed(reason)
    }
}

impl Header {
    /// Reads the header of a file.
    pub fn parse(file: &[u8]) -> Result<Self, Fault> {
        let mut reader = Reader { file, at: 0 };
        match reader.take(4, "its first four bytes")? {
            b"GGUF" => {}
            other => return Err(format!("not a GGUF file: it begins with {:02x?}", other).into()),
        }
        let version = reader.u32("its version")?;
        if version.swap_bytes() < version {
            return Err("it is written for big-endian machines, which is not supported".to_owned().into());
        }
        if !(2..=3).contains(&version) {
            return Err(format!("it is GGUF version {version}: versions 2 and 3 are supported").into());
        }
        // The least bytes of a tensor's entry: an empty name, one dimension, a type, a place.
        let tensors = reader.count("tensors", 8 + 4 + 8 + 4 + 8)?;
        // A key without bytes, a type, and a value of one byte.
        let values = reader.count("metadata values", 8 + 4 + 1)?;
        let values = reader.values(values)?;
        let alignment = match values.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(Value::Unsigned(alignment)) if alignment.is_power_of_two() => *alignment,
            Some(other) => {
                let reason = format!("general.alignment is {}, not a power of two", other.describe());
                return Err(reason.into());
            }
        };
        let entries = (0..tensors).map(|_| reader.tensor()).collect::<Result<Vec<_>, _>>()?;
        let start = (reader.at as u64).checked_next_multiple_of(alignment);
        let start = start.ok_or_else(|| format!("general.alignment is {alignment}, which is too large"))?;
        let tensors = placed(entries, start, alignment, file.len() as u64)?;
        Ok(Self { values, tensors, bytes: reader.at })
    }
}

/// A tensor as its entry describes it.
struct Entry {
    name: String,
    dimensions: Vec<usize>,
    kind: TensorType,
    bytes: u64,
    /// From the start of the tensors' data.
    offset: u64,
}

/// Finds the tensors' bytes, and checks that they are in the file and do not overlap.
fn placed(
    entries: Vec<Entry>,
    start: u64,
    alignment: u64,
    file: u64,
) -> Result<BTreeMap<String, TensorInfo>, Fault> {
    let mut tensors = BTreeMap::new();
    let mut places = Vec::with_capacity(entries.len());
    let mut end_of_all = start;
    for Entry { name, dimensions, kind, bytes, offset } in entries {
        if !offset.is_multiple_of(alignment) {
            let reason = format!(
                "tensor {name:?} begins at {offset}, which is no multiple of the alignment, {alignment}"
            );
            return Err(reason.into());
        }
        let first = start.checked_add(offset);
        let place = first.and_then(|first| Some((first, first.checked_add(bytes)?)));
        let Some((first, end)) = place else {
            return Err(format!("tensor {name:?} is {bytes} bytes at {offset}: no file is that long").into());
        };
        end_of_all = end_of_all.max(end);
        places.push((first, end, name.clone()));
        let info = TensorInfo { dimensions, kind, bytes: first as usize..end as usize };
        if tensors.insert(name.clone(), info).is_some() {
            return Err(format!("it has two tensors named {name:?}").into());
        }
    }
    if end_of_all > file {
        return Err(Fault::Truncated(end_of_all));
    }
    places.sort_unstable();
    for pair in places.windows(2) {
        let [(_, end, first), (start, _, second)] = pair else { unreachable!("windows of two") };
        if start < end {
            return Err(format!("tensors {first:?} and {second:?} overlap").into());
        }
    }
    Ok(tensors)
}

/// Reads a file from front to back.
struct Reader<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize, what: &str) -> Result<&'a [u8], Fault> {
        let rest = &self.file[self.at..];
        let Some(taken) = rest.get(..bytes) else {
            let reason = format!(
                "the file ends inside of {what}: {bytes} bytes from byte {}, but it has {}: download it again",
                self.at,
                self.file.len()
            );
            return Err(reason.into());
        };
        self.at += bytes;
        Ok(taken)
    }

    fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        let bytes = self.take(4, what)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        let (low, high) = (self.u32(what)?, self.u32(what)?);
        Ok(u64::from(high) << 32 | u64::from(low))
    }

    /// A number of things that take at least `least` bytes each.
    fn count(&mut self, what: &str, least: usize) -> Result<usize, Fault> {
        let count = self.u64(&format!("the number of {what}"))?;
        let most = (self.file.len() - self.at) / least;
        usize::try_from(count)
            .ok()
            .filter(|count| *count <= most)
            .ok_or_else(|| {
                format!("it names {count} {what}, but the rest of the file can hold {most} at most")
            })
            .map_err(Fault::from)
    }

    fn text(&mut self, what: &str) -> Result<Range<usize>, Fault> {
        let len = self.u64(what)?;
        let start = self.at;
        self.take(usize::try_from(len).unwrap_or(usize::MAX), what)?;
        Ok(start..self.at)
    }

    fn name(&mut self, what: &str) -> Result<String, Fault> {
        let range = self.text(what)?;
        if range.len() > MAX_NAME_BYTES {
            return Err(format!("{what} has {} bytes, {MAX_NAME_BYTES} are the most", range.len()).into());
        }
        let name = std::str::from_utf8(&self.file[range]);
        Ok(name.map_err(|_| format!("{what} is not UTF-8"))?.to_owned())
    }

    fn values(&mut self, count: usize) -> Result<BTreeMap<String, Value>, Fault> {
        let mut values = BTreeMap::new();
        for index in 0..count {
            let key = self.name(&format!("metadata key {index}"))?;
            let kind = self.kind(&key)?;
            let value = self.value(kind, &key, 0)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(format!("it has two values for {key:?}").into());
            }
        }
        Ok(values)
    }

    fn kind(&mut self, key: &str) -> Result<Kind, Fault> {
        let number = self.u32(key)?;
        Kind::from_number(number)
            .ok_or_else(|| format!("{key} has the unknown type {number}: 0 to 12 are known").into())
    }

    fn value(&mut self, kind: Kind, key: &str, depth: usize) -> Result<Value, Fault> {
        match kind {
            Kind::Text => Ok(Value::Text(self.text(key)?)),
            Kind::List => self.list(key, depth).map(Value::List),
            kind => {
                let bytes = self.take(kind.bytes().unwrap_or_default(), key)?;
                Value::number(kind, bytes).ok_or_else(|| format!("{key} is no number").into())
            }
        }
    }

    fn list(&mut self, key: &str, depth: usize) -> Result<List, Fault> {
        if depth == MAX_DEPTH {
            return Err(format!("{key} has lists in lists, more than {MAX_DEPTH} deep").into());
        }
        let kind = self.kind(key)?;
        // A text is at least its length, a list its type and length.
        let least = kind.bytes().unwrap_or(if kind == Kind::Text { 8 } else { 12 });
        let count = self.count(&format!("items of {key}"), least)?;
        let start = self.at;
        match kind.bytes() {
            Some(bytes) => drop(self.take(count * bytes, key)?),
            None => (0..count).try_for_each(|_| self.value(kind, key, depth + 1).map(drop))?,
        }
        Ok(List { kind, count, bytes: start..self.at })
    }

    fn tensor(&mut self) -> Result<Entry, Fault> {
        let name = self.name("a tensor's name")?;
        let count = self.u32(&name)?;
        if !(1..=MAX_DIMENSIONS).contains(&count) {
            return Err(format!(
                "tensor {name:?} has {count} dimensions: 1 to {MAX_DIMENSIONS} are possible"
            )
            .into());
        }
        let dimensions = (0..count).map(|_| self.u64(&name)).collect::<Result<Vec<_>, _>>()?;
        let number = self.u32(&name)?;
        let offset = self.u64(&name)?;
        let kind = TensorType::from_number(number).ok_or_else(|| {
            format!(
                "tensor {name:?} has the unknown type {number}: supported are {}",
                TensorType::supported()
            )
        })?;
        let too_large = || format!("tensor {name:?} has the shape {dimensions:?}, which is not possible");
        let columns = dimensions.first().copied().unwrap_or_default();
        if !columns.is_multiple_of(kind.columns as u64) || dimensions.contains(&0) {
            let reason = format!(
                "tensor {name:?} has the shape {dimensions:?}: rows of {} are whole blocks of {}",
                kind.name, kind.columns
            );
            return Err(reason.into());
        }
        let elements = dimensions.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        let blocks = elements.ok_or_else(too_large)? / kind.columns as u64;
        let bytes = blocks.checked_mul(kind.bytes as u64).ok_or_else(too_large)?;
        let dimensions = dimensions.iter().map(|size| usize::try_from(*size));
        let dimensions =
            dimensions.collect::<Result<_, _>>().map_err(|_| format!("tensor {name:?} is too large"))?;
        Ok(Entry { name, dimensions, kind, bytes, offset })
    }
}
