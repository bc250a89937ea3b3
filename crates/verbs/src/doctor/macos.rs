//! Parses the output of macOS's tools. Compiled on every system, so that it is tested on every
//! system.

use serde::Serialize;
use serde_json::Value;

/// The result of `rdma_ctl status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RdmaControl {
    /// RDMA is enabled. Not proof of suitable hardware: Thunderbolt 4 Macs can enable it too.
    Enabled,
    /// RDMA is disabled.
    Disabled,
    /// There is no `rdma_ctl`: macOS before 26.2.
    Missing,
    /// Any other output.
    Unclear(String),
}

/// Parses the output of `rdma_ctl status`: a single word, or the word in a sentence.
pub fn parse_rdma_ctl(text: &str) -> RdmaControl {
    let contains = |word: &str| {
        text.split(|c: char| !c.is_ascii_alphabetic()).any(|have| have.eq_ignore_ascii_case(word))
    };
    match (contains("enabled"), contains("disabled") || contains("not")) {
        (_, true) => RdmaControl::Disabled,
        (true, false) => RdmaControl::Enabled,
        (false, false) => RdmaControl::Unclear(text.trim().to_string()),
    }
}

/// A Thunderbolt port of this Mac, and the Mac connected to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ThunderboltPort {
    /// The N of `networksetup`'s name "Thunderbolt N".
    pub receptacle: Option<String>,
    /// Speed in Gbit/s. Above 40, both Macs and the cable have Thunderbolt 5.
    pub gbits: Option<u32>,
    /// The identifier of this end.
    pub domain: Option<String>,
    /// The name of the connected Mac.
    pub peer: Option<String>,
    /// The identifier of the other end: the `domain` of a port of the connected Mac.
    pub peer_domain: Option<String>,
}

impl ThunderboltPort {
    /// True if the port is too slow for Thunderbolt 5.
    pub fn is_thunderbolt_4(&self) -> bool {
        self.gbits.is_some_and(|gbits| gbits <= 40)
    }
}

/// Parses the output of `system_profiler SPThunderboltDataType -json`. Missing values become
/// `None`.
pub fn parse_thunderbolt(text: &str) -> Vec<ThunderboltPort> {
    let Ok(root) = serde_json::from_str::<Value>(text) else { return Vec::new() };
    let string = |value: &Value| value.as_str().map(str::to_string);
    let port = |bus: &Value| {
        let receptacle = &bus["receptacle_1_tag"];
        // Docks and disks are items too; only a Mac has a domain.
        let items = bus["_items"].as_array().map_or(&[][..], Vec::as_slice);
        let peer = items.iter().find(|item| item["domain_uuid_key"].is_string());
        ThunderboltPort {
            receptacle: string(&receptacle["receptacle_id_key"]),
            gbits: receptacle["current_speed_key"].as_str().and_then(gbits),
            domain: string(&bus["domain_uuid_key"]),
            peer: peer.and_then(|peer| string(&peer["_name"])),
            peer_domain: peer.and_then(|peer| string(&peer["domain_uuid_key"])),
        }
    };
    root["SPThunderboltDataType"].as_array().map_or(&[][..], Vec::as_slice).iter().map(port).collect()
}

/// The number in "Up to 120 Gb/s" or "80 Gb/s".
fn gbits(text: &str) -> Option<u32> {
    text.strip_suffix("Gb/s")?.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Two buses as macOS 26 prints them, shortened: a Mac on the first, nothing on the second.
    pub(crate) const TWO_BUSES: &str = r#"{ "SPThunderboltDataType" : [
      { "_name" : "thunderboltusb4_bus_2", "device_name_key" : "Mac mini",
        "domain_uuid_key" : "7F158861-C131-4D0D-83B6-CA50EF76C32B",
        "receptacle_1_tag" : { "current_speed_key" : "80 Gb/s", "link_status_key" : "0x2",
          "receptacle_id_key" : "3", "receptacle_status_key" : "receptacle_connected" },
        "_items" : [
          { "_name" : "A dock", "device_name_key" : "Dock" },
          { "_name" : "Mac Studio", "device_name_key" : "Mac16,9",
            "domain_uuid_key" : "88F10ACA-5CAA-4F5D-8361-03EED54ACB5A" } ] },
      { "_name" : "thunderboltusb4_bus_1", "device_name_key" : "Mac mini",
        "domain_uuid_key" : "0A3248FD-13DA-4F5B-9167-7C469F35421C",
        "receptacle_1_tag" : { "current_speed_key" : "Up to 120 Gb/s", "link_status_key" : "0x7",
          "receptacle_id_key" : "2", "receptacle_status_key" : "receptacle_no_devices_connected" } } ] }"#;

    #[test]
    fn rdma_ctl_output_may_be_a_word_or_a_sentence() {
        assert_eq!(parse_rdma_ctl("enabled\n"), RdmaControl::Enabled);
        assert_eq!(parse_rdma_ctl("RDMA is enabled."), RdmaControl::Enabled);
        assert_eq!(parse_rdma_ctl("disabled\n"), RdmaControl::Disabled);
        assert_eq!(parse_rdma_ctl("RDMA is not enabled"), RdmaControl::Disabled);
        assert_eq!(parse_rdma_ctl("usage: …\n"), RdmaControl::Unclear("usage: …".to_string()));
    }

    #[test]
    fn the_connected_mac_is_found_among_other_items() {
        let ports = parse_thunderbolt(TWO_BUSES);
        assert_eq!(ports.len(), 2);
        assert_eq!(ports[0].peer.as_deref(), Some("Mac Studio"));
        assert_eq!(ports[0].peer_domain.as_deref(), Some("88F10ACA-5CAA-4F5D-8361-03EED54ACB5A"));
        assert_eq!((ports[0].gbits, ports[0].receptacle.as_deref()), (Some(80), Some("3")));
        assert_eq!((ports[1].gbits, &ports[1].peer), (Some(120), &None));
        assert!(!ports[0].is_thunderbolt_4());
    }

    #[test]
    fn unexpected_output_gives_no_ports_and_no_panic() {
        assert_eq!(parse_thunderbolt("no json"), []);
        assert_eq!(parse_thunderbolt(r#"{"SPThunderboltDataType": 3}"#), []);
        let ports = parse_thunderbolt(
            r#"{"SPThunderboltDataType": [{"receptacle_1_tag": {"current_speed_key": "fast"}}]}"#,
        );
        assert_eq!((ports.len(), ports[0].gbits), (1, None));
    }
}
