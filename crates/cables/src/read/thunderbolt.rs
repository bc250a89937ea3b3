//! `system_profiler SPThunderboltDataType -json`.

use serde_json::Value;

use crate::machine::{Attached, Port};

/// Deeper trees of devices are not followed: Thunderbolt chains have at most six devices.
const DEEPEST: usize = 8;
/// Apple's vendor, as a machine at the other end of a cable gives it.
const MOST_PORTS: usize = 64;

/// The ports that the text lists.
///
/// # Errors
/// When the text is not what `system_profiler` prints.
pub(super) fn ports(text: &str) -> Result<Vec<Port>, String> {
    let value: Value = serde_json::from_str(text)
        .map_err(|error| format!("system_profiler's JSON is malformed: {error}"))?;
    let buses = value
        .get("SPThunderboltDataType")
        .and_then(Value::as_array)
        .ok_or("system_profiler's JSON has no list SPThunderboltDataType")?;
    Ok(buses.iter().flat_map(bus_ports).take(MOST_PORTS).collect())
}

/// A bus has one receptacle on Macs with Apple's chips, and may have two on older ones.
fn bus_ports(bus: &Value) -> Vec<Port> {
    let uuid = text(bus, "domain_uuid_key").map(|uuid| uuid.to_uppercase());
    let items = bus.get("_items").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let Some(object) = bus.as_object() else { return Vec::new() };
    let tags: Vec<&Value> = object
        .iter()
        .filter(|(key, _)| key.starts_with("receptacle_") && key.ends_with("_tag"))
        .map(|(_, tag)| tag)
        .collect();
    let connected =
        |tag: &Value| text(tag, "receptacle_status_key").as_deref() == Some("receptacle_connected");
    let only = tags.len() == 1;
    tags.into_iter()
        .enumerate()
        .map(|(index, tag)| {
            let speed = text(tag, "current_speed_key").unwrap_or_default();
            let (gbits, is_capability) = parse_speed(&speed);
            // The output does not show which item belongs to which of two receptacles.
            let item = items.get(if only { 0 } else { index });
            let attached = match (item, connected(tag)) {
                (Some(item), _) => attached(item),
                (None, true) => Attached::Unknown,
                (None, false) => Attached::Nothing,
            };
            Port {
                name: text(tag, "receptacle_id_key").unwrap_or_default(),
                uuid: uuid.clone(),
                interface: None,
                link_gbits: gbits.filter(|_| !is_capability),
                most_gbits: gbits.filter(|_| is_capability),
                attached,
            }
        })
        .collect()
}

/// The kind of an item. A machine has its own domain; devices belong to the bus's domain.
fn attached(item: &Value) -> Attached {
    if let Some(machine) = machine(item, None) {
        return machine;
    }
    let name = name_of(item);
    machine_behind(item, &name, DEEPEST).unwrap_or(Attached::Device { name })
}

fn machine(item: &Value, via: Option<&str>) -> Option<Attached> {
    let uuid = text(item, "domain_uuid_key")?.to_uppercase();
    let services =
        item.get("services_title").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let offers_ip = services.iter().any(|service| text(service, "_name").as_deref() == Some("service_ip"));
    let (name, model) = (name_of(item), text(item, "device_name_key"));
    Some(Attached::Machine { uuid, name, model, via: via.map(str::to_owned), offers_ip })
}

fn machine_behind(item: &Value, via: &str, left: usize) -> Option<Attached> {
    let items = item.get("_items")?.as_array()?;
    items
        .iter()
        .find_map(|item| machine(item, Some(via)).or_else(|| machine_behind(item, via, left.checked_sub(1)?)))
}

fn name_of(item: &Value) -> String {
    text(item, "_name").or_else(|| text(item, "device_name_key")).unwrap_or_else(|| "a device".to_owned())
}

fn text(value: &Value, key: &str) -> Option<String> {
    let text: String =
        value.get(key)?.as_str()?.chars().filter(|letter| !letter.is_control()).take(120).collect();
    (!text.is_empty()).then_some(text)
}

/// `80 Gb/s` is a link; `Up to 120 Gb/s` is what an idle port could do. Returns the number, and
/// whether it is the second.
pub(super) fn parse_speed(text: &str) -> (Option<u32>, bool) {
    let rest = text.strip_prefix("Up to ");
    let number = rest.unwrap_or(text).split(' ').next().unwrap_or_default();
    // Linux writes "20.0 Gb/s".
    let gbits = number.parse::<f64>().ok().filter(|gbits| (0.0..10_000.0).contains(gbits));
    (gbits.map(|gbits| gbits as u32), rest.is_some())
}
