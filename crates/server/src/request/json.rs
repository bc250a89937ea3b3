//! JSON with limited memory: a value takes up to 500 bytes, and three bytes of a body can be a
//! value.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::ApiError;

/// Maximum number of values in a body: more than any prompt of token ids has.
const MAX_VALUES: usize = 1 << 20;
/// Maximum number of fields of all objects of a body.
const MAX_FIELDS: usize = 1 << 16;

/// Parses a body.
pub(crate) fn parse(bytes: &[u8]) -> Result<Value, ApiError> {
    let budget = Budget { values: Cell::new(MAX_VALUES), fields: Cell::new(MAX_FIELDS) };
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let parsed =
        (&budget).deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    parsed.map_err(|error| match budget.values.get().min(budget.fields.get()) {
        0 => ApiError::invalid(format!(
            "the body has more than {MAX_VALUES} values or {MAX_FIELDS} fields of objects: send less at once"
        )),
        _ => ApiError::invalid(format!("the body is not JSON: {error}")),
    })
}

/// The remaining allowance of a body.
struct Budget {
    values: Cell<usize>,
    fields: Cell<usize>,
}

fn take<E: Error>(left: &Cell<usize>) -> Result<(), E> {
    left.set(left.get().saturating_sub(1));
    if left.get() == 0 { Err(E::custom("too many values")) } else { Ok(()) }
}

impl<'de> DeserializeSeed<'de> for &Budget {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        take(&self.values)?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &Budget {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            take(&self.fields)?;
            object.insert(name, fields.next_value_seed(self)?);
        }
        Ok(object.into())
    }
}
