//! The embedded store: one redb file, which only one process at a time can open.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
    WriteTransaction,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::access::shared::Shared;
use crate::audit::{Actor, Chain, Entry, FIRST_PREVIOUS, Sealed};
use crate::error::AccessError;
use crate::key::StoredKey;
use crate::limits::Policy;
use crate::private;
use crate::prompts::KeepPolicy;
use crate::time::{HOUR_MS, Time};
use crate::usage::{By, Dimensions, Filter, Groups, Sums, UsageRecord};

/// The store's file in the data folder.
pub(crate) const FILE: &str = "access.redb";
/// The format that this version writes.
const FORMAT: u64 = 1;
/// Memory for pages of the store.
const CACHE_BYTES: usize = 16 << 20;
/// Clocks are sometimes set back, so the search for records goes this much beyond the requested
/// time.
const DISORDER_MS: u64 = HOUR_MS;

pub(crate) const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
/// By id: [`StoredKey`].
pub(crate) const KEYS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("keys");
/// By number: [`UsageRecord`].
pub(crate) const RECORDS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("records");
/// By hour and [`Dimensions`]: [`Sums`].
pub(crate) const HOURS: TableDefinition<'_, (u64, &str), &[u8]> = TableDefinition::new("hours");
/// By number: text and hash.
pub(crate) const AUDIT: TableDefinition<'_, u64, (&str, &str)> = TableDefinition::new("audit");

const META_FORMAT: &str = "format";
const META_POLICY: &str = "policy";
/// Present in the store of a cluster's node, whose keys and limits are the cluster's.
const META_SHARED: &str = "shared";
/// Whose prompts and answers are kept.
const META_KEEP: &str = "keep";
/// Number of the last usage record that is in the store.
const META_MOVED: &str = "moved";

/// The open store.
#[derive(Debug)]
pub(crate) struct Store {
    database: Database,
    path: PathBuf,
    /// Name of the node of a cluster, for the audit log.
    pub node: OnceLock<String>,
}

/// An act for the audit log.
#[derive(Debug)]
pub(crate) struct Act<'a> {
    pub actor: &'a Actor,
    pub time: Time,
    pub action: &'a str,
    pub subject: Option<&'a str>,
    pub details: Value,
}

/// A query for entries of the audit log.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AuditFilter {
    /// From this moment.
    pub since: Option<Time>,
    /// Before this moment.
    pub until: Option<Time>,
    /// With this action.
    pub action: Option<String>,
}

impl Store {
    /// Opens the store of a data folder, and creates both if they do not exist.
    pub fn open(folder: &Path) -> Result<Self, AccessError> {
        private::make_folder(folder).map_err(AccessError::system("make", folder))?;
        let path = folder.join(FILE);
        match private::create_new(&path, false) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(AccessError::system("make", &path)(error));
            }
            _ => {}
        }
        let database = Database::builder().set_cache_size(CACHE_BYTES).create(&path);
        let database = database.map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => AccessError::InUse(path.clone()),
            other => AccessError::Store { path: path.clone(), why: other.to_string() },
        })?;
        let private = fs::Permissions::from_mode(0o600);
        fs::set_permissions(&path, private).map_err(AccessError::system("protect", &path))?;
        let store = Self { database, path, node: OnceLock::new() };
        store.check_format()?;
        Ok(store)
    }

    fn check_format(&self) -> Result<(), AccessError> {
        let found = self.write(|transaction| {
            transaction.open_table(KEYS)?;
            transaction.open_table(RECORDS)?;
            transaction.open_table(HOURS)?;
            transaction.open_table(AUDIT)?;
            let mut meta = transaction.open_table(META)?;
            let found = meta.get(META_FORMAT)?.map(|value| number(value.value()));
            if found.is_none() {
                meta.insert(META_FORMAT, FORMAT.to_le_bytes().as_slice())?;
            }
            Ok(found.unwrap_or(FORMAT))
        })?;
        if found > FORMAT {
            return Err(AccessError::Format { path: self.path.clone(), found, known: FORMAT });
        }
        Ok(())
    }

    fn failed(&self, why: impl std::fmt::Display) -> AccessError {
        AccessError::Store { path: self.path.clone(), why: why.to_string() }
    }

    /// Changes the store, all or nothing. The change is on the disk when this returns.
    pub fn write<T>(
        &self,
        change: impl FnOnce(&WriteTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, AccessError> {
        let mut transaction = self.database.begin_write().map_err(|error| self.failed(error))?;
        // After a crash the store opens at once, without a search through the whole file.
        transaction.set_quick_repair(true);
        let value = change(&transaction).map_err(|error| self.failed(error))?;
        transaction.commit().map_err(|error| self.failed(error))?;
        Ok(value)
    }

    pub fn read<T>(
        &self,
        look: impl FnOnce(&redb::ReadTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, AccessError> {
        let transaction = self.database.begin_read().map_err(|error| self.failed(error))?;
        look(&transaction).map_err(|error| self.failed(error))
    }

    /// All keys.
    pub fn keys(&self) -> Result<Vec<StoredKey>, AccessError> {
        let texts = self.read(|transaction| {
            let table = transaction.open_table(KEYS)?;
            table.iter()?.map(|entry| Ok(entry?.1.value().to_vec())).collect::<Result<Vec<_>, redb::Error>>()
        })?;
        texts.iter().map(|text| self.parse(text)).collect()
    }

    /// Writes keys and an entry of the audit log.
    pub fn put_keys(&self, keys: &[&StoredKey], act: &Act<'_>) -> Result<(), AccessError> {
        self.write(|transaction| {
            let mut table = transaction.open_table(KEYS)?;
            for key in keys {
                table.insert(key.key.id.as_str(), json(key).as_slice())?;
            }
            note(transaction, act, self.node.get())
        })
    }

    /// Whether keys and limits are those of a cluster.
    pub fn is_shared(&self) -> Result<bool, AccessError> {
        self.read(|transaction| Ok(transaction.open_table(META)?.get(META_SHARED)?.is_some()))
    }

    /// Replaces keys, limits and the policy of kept prompts with those of a cluster.
    pub fn put_shared(&self, Shared { keys, policy, keep }: &Shared) -> Result<(), AccessError> {
        self.write(|transaction| {
            let mut table = transaction.open_table(KEYS)?;
            table.retain(|_, _| false)?;
            for key in keys {
                table.insert(key.key.id.as_str(), json(key).as_slice())?;
            }
            let mut meta = transaction.open_table(META)?;
            meta.insert(META_POLICY, json(policy).as_slice())?;
            meta.insert(META_KEEP, json(keep).as_slice())?;
            meta.insert(META_SHARED, [].as_slice())?;
            Ok(())
        })
    }

    /// The number of the first record that ended after a moment; if there is none, one beyond the
    /// last.
    pub fn number_after(&self, time: Time) -> Result<u64, AccessError> {
        self.read(|transaction| {
            let table = transaction.open_table(RECORDS)?;
            let first = table.first()?.map_or(1, |(number, _)| number.value());
            let (mut low, mut high) = (first, table.last()?.map_or(0, |(number, _)| number.value()) + 1);
            while low < high {
                let middle = low + (high - low) / 2;
                let record = table.get(middle)?;
                let record = record.and_then(|text| serde_json::from_slice::<UsageRecord>(text.value()).ok());
                match record {
                    Some(record) if record.time > time => high = middle,
                    _ => low = middle + 1,
                }
            }
            Ok(low)
        })
    }

    /// All limits except those of single keys.
    pub fn policy(&self) -> Result<Policy, AccessError> {
        let text = self.read(|transaction| {
            let meta = transaction.open_table(META)?;
            Ok(meta.get(META_POLICY)?.map(|value| value.value().to_vec()))
        })?;
        text.map_or_else(|| Ok(Policy::default()), |text| self.parse(&text))
    }

    /// Writes the limits and an entry of the audit log.
    pub fn put_policy(&self, policy: &Policy, act: &Act<'_>) -> Result<(), AccessError> {
        self.write(|transaction| {
            transaction.open_table(META)?.insert(META_POLICY, json(policy).as_slice())?;
            note(transaction, act, self.node.get())
        })
    }

    /// Whose prompts and answers are kept.
    pub fn keep_policy(&self) -> Result<KeepPolicy, AccessError> {
        let text = self.read(|transaction| {
            let meta = transaction.open_table(META)?;
            Ok(meta.get(META_KEEP)?.map(|value| value.value().to_vec()))
        })?;
        text.map_or_else(|| Ok(KeepPolicy::default()), |text| self.parse(&text))
    }

    /// Writes whose prompts and answers are kept, and an entry of the audit log.
    pub fn put_keep_policy(&self, policy: &KeepPolicy, act: &Act<'_>) -> Result<(), AccessError> {
        self.write(|transaction| {
            transaction.open_table(META)?.insert(META_KEEP, json(policy).as_slice())?;
            note(transaction, act, self.node.get())
        })
    }

    /// Writes an entry of the audit log.
    pub fn note(&self, act: &Act<'_>) -> Result<(), AccessError> {
        self.write(|transaction| note(transaction, act, self.node.get()))
    }

    /// Number of the last usage record that is in the store.
    pub fn moved(&self) -> Result<u64, AccessError> {
        self.read(|transaction| {
            let meta = transaction.open_table(META)?;
            Ok(meta.get(META_MOVED)?.map_or(0, |value| number(value.value())))
        })
    }

    /// Adds usage records. Records that are already there change nothing.
    pub fn add_records(&self, records: &[UsageRecord]) -> Result<(), AccessError> {
        self.write(|transaction| {
            let mut meta = transaction.open_table(META)?;
            let moved = meta.get(META_MOVED)?.map_or(0, |value| number(value.value()));
            let mut sums: BTreeMap<(u64, String), Sums> = BTreeMap::new();
            let mut table = transaction.open_table(RECORDS)?;
            for record in records.iter().filter(|record| record.number > moved) {
                table.insert(record.number, json(record).as_slice())?;
                let dimensions = text(&Dimensions::of(record));
                sums.entry((record.time.0 / HOUR_MS, dimensions)).or_default().add(record);
            }
            let mut hours = transaction.open_table(HOURS)?;
            for ((hour, dimensions), mut sum) in sums {
                let key = (hour, dimensions.as_str());
                if let Some(before) = hours.get(key)? {
                    sum.merge(&serde_json::from_slice(before.value()).unwrap_or_default());
                }
                hours.insert(key, json(&sum).as_slice())?;
            }
            let last = records.last().map_or(moved, |last| last.number.max(moved));
            meta.insert(META_MOVED, last.to_le_bytes().as_slice())?;
            Ok(())
        })
    }

    /// Sums of whole hours, divided by these.
    pub fn sums(&self, filter: &Filter, by: &[By]) -> Result<Groups, AccessError> {
        let mut groups = Groups::new();
        self.each_hour(filter, |hour, dimensions, sums| {
            let values = by.iter().map(|by| dimensions.value(*by, hour)).collect();
            groups.entry(values).or_default().merge(sums);
        })?;
        Ok(groups)
    }

    /// Passes the sums of whole hours to `take`.
    pub fn each_hour(
        &self,
        filter: &Filter,
        mut take: impl FnMut(Time, &Dimensions, &Sums),
    ) -> Result<(), AccessError> {
        let first = filter.since.map_or(0, |since| since.0 / HOUR_MS);
        let last = filter.until.map_or(u64::MAX / HOUR_MS, |until| until.0.div_ceil(HOUR_MS));
        self.read(|transaction| {
            let hours = transaction.open_table(HOURS)?;
            for entry in hours.range((first, "")..(last, ""))? {
                let (key, value) = entry?;
                let (hour, dimensions) = key.value();
                let Ok(dimensions) = serde_json::from_str::<Dimensions>(dimensions) else { continue };
                let sums = serde_json::from_slice(value.value()).unwrap_or_default();
                if filter.fits(&dimensions) {
                    take(Time(hour * HOUR_MS), &dimensions, &sums);
                }
            }
            Ok(())
        })
    }

    /// Usage records with numbers below `before`, newest first, until `take` has enough.
    pub fn each_record(
        &self,
        filter: &Filter,
        before: u64,
        mut take: impl FnMut(UsageRecord) -> bool,
    ) -> Result<(), AccessError> {
        let oldest = filter.since.map_or(0, |since| since.0.saturating_sub(DISORDER_MS));
        self.read(|transaction| {
            let table = transaction.open_table(RECORDS)?;
            for entry in table.range(..before)?.rev() {
                let Ok(record) = serde_json::from_slice::<UsageRecord>(entry?.1.value()) else { continue };
                if record.time.0 < oldest {
                    break;
                }
                let fits = filter.holds(record.time) && filter.fits(&Dimensions::of(&record));
                if fits && !take(record) {
                    break;
                }
            }
            Ok(())
        })
    }

    /// Removes records that ended before one moment, and sums before another.
    pub fn forget(&self, records_before: Time, sums_before: Time) -> Result<u64, AccessError> {
        self.write(|transaction| {
            let mut table = transaction.open_table(RECORDS)?;
            let mut removed = 0;
            loop {
                let first = table.first()?.and_then(|(number, value)| {
                    let record = serde_json::from_slice::<UsageRecord>(value.value());
                    let is_old = record.map_or(true, |record| record.time < records_before);
                    is_old.then(|| number.value())
                });
                let Some(number) = first else { break };
                table.remove(number)?;
                removed += 1;
            }
            let mut hours = transaction.open_table(HOURS)?;
            hours.retain_in((0, "")..(sums_before.0 / HOUR_MS, ""), |_, _| false)?;
            Ok(removed)
        })
    }

    /// Entries of the audit log with numbers below `before`, newest first, until `take` has enough.
    pub fn each_entry(
        &self,
        filter: &AuditFilter,
        before: u64,
        mut take: impl FnMut(u64, Sealed) -> bool,
    ) -> Result<(), AccessError> {
        self.read(|transaction| {
            let table = transaction.open_table(AUDIT)?;
            for entry in table.range(..before)?.rev() {
                let (number, value) = entry?;
                let (text, hash) = value.value();
                let sealed = Sealed { text: text.to_owned(), hash: hash.to_owned() };
                let entry: Option<Entry> = serde_json::from_str(text).ok();
                // An unreadable entry is still listed, so that the reader sees that it was changed.
                let fits = entry.is_none_or(|entry| {
                    filter.since.is_none_or(|since| since <= entry.time)
                        && filter.until.is_none_or(|until| entry.time < until)
                        && filter.action.as_ref().is_none_or(|action| *action == entry.action)
                });
                if fits && !take(number.value(), sealed) {
                    break;
                }
            }
            Ok(())
        })
    }

    /// Checks the audit log from its first entry.
    pub fn verify(&self) -> Result<Chain, AccessError> {
        let chain = self.read(|transaction| {
            let table = transaction.open_table(AUDIT)?;
            let mut chain = Chain::default();
            for entry in table.iter()? {
                let (_, value) = entry?;
                let (text, hash) = value.value();
                let sealed = Sealed { text: text.to_owned(), hash: hash.to_owned() };
                if let Err(broken) = chain.check(&sealed) {
                    return Ok(Err(broken));
                }
            }
            Ok(Ok(chain))
        })?;
        Ok(chain?)
    }

    /// Records in the store, and entries of the audit log.
    pub fn counts(&self) -> Result<(u64, u64), AccessError> {
        self.read(|transaction| {
            Ok((transaction.open_table(RECORDS)?.len()?, transaction.open_table(AUDIT)?.len()?))
        })
    }

    fn parse<T: DeserializeOwned>(&self, text: &[u8]) -> Result<T, AccessError> {
        serde_json::from_slice(text).map_err(|error| self.failed(error))
    }
}

/// Appends an entry to the audit log.
fn note(transaction: &WriteTransaction, act: &Act<'_>, node: Option<&String>) -> Result<(), redb::Error> {
    let mut table = transaction.open_table(AUDIT)?;
    let last = table.last()?.map(|(number, value)| (number.value(), value.value().1.to_owned()));
    let (number, previous) = last.unwrap_or_else(|| (0, FIRST_PREVIOUS.to_owned()));
    let entry = Entry {
        number: number + 1,
        node: node.cloned(),
        time: act.time,
        actor: act.actor.name.clone(),
        remote: act.actor.remote.clone(),
        action: act.action.to_owned(),
        subject: act.subject.map(str::to_owned),
        details: act.details.clone(),
        previous,
    };
    let sealed = Sealed::of(&entry);
    tracing::info!(
        actor = act.actor.name,
        action = act.action,
        subject = act.subject,
        audit_number = entry.number,
        audit_head = sealed.hash,
        "administrative act"
    );
    table.insert(entry.number, (sealed.text.as_str(), sealed.hash.as_str()))?;
    Ok(())
}

fn json(value: &impl Serialize) -> Vec<u8> {
    // Maps with text keys, strings and numbers always serialize.
    serde_json::to_vec(value).unwrap_or_default()
}

fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn number(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}
