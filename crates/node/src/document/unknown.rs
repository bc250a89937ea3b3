//! Fields of a newer version. They are kept and passed on, so that a node of an older version does
//! not remove what it does not know.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// Fields that this version does not know, as JSON. Flatten this into a structure.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unknown(BTreeMap<String, String>);

impl Serialize for Unknown {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let value = |text: &String| serde_json::from_str::<Value>(text).map_err(serde::ser::Error::custom);
        let fields = self.0.iter().map(|(name, text)| Ok((name, value(text)?)));
        to.collect_map(fields.collect::<Result<Vec<_>, S::Error>>()?)
    }
}

impl<'de> Deserialize<'de> for Unknown {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let fields = BTreeMap::<String, Value>::deserialize(from)?;
        Ok(Self(fields.into_iter().map(|(name, value)| (name, value.to_string())).collect()))
    }
}
