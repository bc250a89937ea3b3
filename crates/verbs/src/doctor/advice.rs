//! Advice for the problems in a report.

use super::macos::RdmaControl;
use super::report::{MacosReport, Report};
use crate::device::PortInfo;

/// More than enough for channels to several peers.
const LOCKED_MEMORY_WANTED_BYTES: u64 = 256 << 20;

/// Advice on a report, most important first.
pub(super) fn advise(report: &Report) -> Vec<String> {
    let mut advice = Vec::new();
    if let Some(problem) = &report.library.problem {
        advice.push(problem.clone());
    }
    match &report.macos {
        Some(macos) => advise_mac(report, macos, &mut advice),
        None => advise_linux(report, &mut advice),
    }
    for device in &report.devices {
        let name = &device.name;
        if let Some(problem) = &device.problem {
            let replug = if report.macos.is_some() { "; unplug its cable and plug it in again" } else { "" };
            advice.push(format!("{name} cannot be used: {problem}{replug}"));
            continue;
        }
        for port in &device.ports {
            advise_port(name, port, &mut advice);
        }
    }
    advice
}

fn advise_port(device: &str, port: &PortInfo, advice: &mut Vec<String>) {
    let number = port.number;
    if !port.state.is_active() {
        let remedy = "check the cable, and that its network interface is up";
        advice.push(format!("port {number} of {device} is not active ({:?}): {remedy}", port.state));
    } else if port.gids.is_empty() {
        advice.push(format!("port {number} of {device} has no GID: give its network interface an address"));
    } else if !port.gids.iter().any(|entry| entry.gid.ipv4().is_some()) {
        let remedy = "give its network interface an IPv4 address in a subnet of its own";
        advice.push(format!("port {number} of {device} has only a link-local GID: {remedy}"));
    }
}

fn advise_mac(report: &Report, macos: &MacosReport, advice: &mut Vec<String>) {
    let thunderbolt_4 = !macos.ports.is_empty() && macos.ports.iter().all(|port| port.is_thunderbolt_4());
    if thunderbolt_4 {
        let speed = "no Thunderbolt port of this Mac runs above 40 Gbit/s";
        advice
            .push(format!("{speed}: RDMA needs Thunderbolt 5 in both Macs and the cable; TCP will be used"));
        return;
    }
    match &macos.control {
        RdmaControl::Missing => {
            advice.push("there is no rdma_ctl: RDMA over Thunderbolt needs macOS 26.2 or later".to_string());
        }
        RdmaControl::Disabled => {
            let steps = "start in Recovery, open Terminal, run `rdma_ctl enable`, and restart";
            advice.push(format!("RDMA is disabled on this Mac: {steps}"));
        }
        RdmaControl::Unclear(text) => {
            advice.push(format!("`rdma_ctl status` says {text:?} but should say \"enabled\""));
        }
        RdmaControl::Enabled if report.devices.is_empty() => {
            let causes = "restart after enabling it; a Thunderbolt 4 Mac never has a device";
            advice.push(format!("RDMA is enabled, but the system lists no device: {causes}"));
        }
        RdmaControl::Enabled => {}
    }
    if macos.ports.iter().all(|port| port.peer.is_none()) {
        advice.push("no other Mac is connected by Thunderbolt: connect one".to_string());
    }
}

fn advise_linux(report: &Report, advice: &mut Vec<String>) {
    let library_works = report.library.problem.is_none();
    if report.kernel_devices.is_empty() {
        let remedy = "install a RoCE or InfiniBand adapter and its driver; for tests, a slow software device: \
                      `rdma link add rxe0 type rxe netdev INTERFACE`";
        advice.push(format!("the kernel has no RDMA device: {remedy}"));
    } else if library_works && report.devices.is_empty() {
        let names = report.kernel_devices.join(", ");
        let remedy = "install ibverbs-providers, and make sure that this user may open /dev/infiniband";
        advice.push(format!("the kernel has {names}, but the library cannot use any: {remedy}"));
    }
    match report.locked_memory_limit_bytes {
        Some(bytes) if bytes < LOCKED_MEMORY_WANTED_BYTES && !report.kernel_devices.is_empty() => {
            let mib = bytes >> 20;
            advice.push(format!(
                "only {mib} MiB of memory may be locked: raise the limit with `ulimit -l unlimited`"
            ));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::macos::{parse_thunderbolt, tests::TWO_BUSES};
    use super::super::report::{DeviceReport, LibraryReport};
    use super::*;
    use crate::device::{LinkLayer, PortState};
    use crate::gid::{Gid, GidEntry};

    fn report() -> Report {
        let library = LibraryReport { tried: vec![], found: Some("lib".into()), problem: None };
        Report {
            usable: false,
            library,
            kernel_devices: vec![],
            devices: vec![],
            locked_memory_limit_bytes: None,
            macos: None,
            advice: vec![],
        }
    }

    fn mac(control: RdmaControl, thunderbolt: &str) -> Report {
        Report { macos: Some(MacosReport { control, ports: parse_thunderbolt(thunderbolt) }), ..report() }
    }

    fn device(state: PortState, gids: &[&str]) -> DeviceReport {
        let entry = |(index, gid): (usize, &&str)| GidEntry {
            index: index as u8,
            gid: Gid::from_bytes(gid.parse::<std::net::Ipv6Addr>().unwrap().octets()),
            kind: None,
            interface: None,
        };
        let port = PortInfo {
            number: 1,
            state,
            active_mtu_bytes: 4096,
            max_mtu_bytes: 4096,
            rate_gbits: None,
            link_layer: LinkLayer::Ethernet,
            max_message_bytes: 1 << 30,
            lid: 0,
            gids: gids.iter().enumerate().map(entry).collect(),
        };
        DeviceReport { name: "rdma_en3".into(), limits: None, ports: vec![port], problem: None }
    }

    /// Asserts that some advice contains `part`.
    fn assert_advice(report: &Report, part: &str) {
        let advice = advise(report);
        assert!(advice.iter().any(|line| line.contains(part)), "{part:?} is not in {advice:#?}");
    }

    #[test]
    fn advice_for_a_mac_depends_on_rdma_ctl_the_version_the_speed_and_the_cable() {
        assert_advice(&mac(RdmaControl::Disabled, TWO_BUSES), "rdma_ctl enable");
        assert_advice(&mac(RdmaControl::Missing, TWO_BUSES), "26.2");
        assert_advice(&mac(RdmaControl::Enabled, TWO_BUSES), "lists no device");
        assert_advice(&mac(RdmaControl::Enabled, &TWO_BUSES.replace("domain_uuid", "x")), "no other Mac");
        let slow = TWO_BUSES.replace("80 Gb/s", "40 Gb/s").replace("120 Gb/s", "40 Gb/s");
        let advice = advise(&mac(RdmaControl::Disabled, &slow));
        assert_eq!(advice.len(), 1, "enabling RDMA does not help on Thunderbolt 4: {advice:#?}");
        assert!(advice[0].contains("Thunderbolt 5"), "{advice:#?}");
    }

    #[test]
    fn advice_for_linux_names_missing_devices_providers_and_memory() {
        assert_advice(&report(), "no RDMA device");
        let no_provider = Report { kernel_devices: vec!["mlx5_0".into()], ..report() };
        assert_advice(&no_provider, "ibverbs-providers");
        assert_advice(&Report { locked_memory_limit_bytes: Some(8 << 20), ..no_provider }, "only 8 MiB");
        let library = LibraryReport { tried: vec![], found: None, problem: Some("no library at all".into()) };
        assert_advice(&Report { library, ..report() }, "no library at all");
    }

    #[test]
    fn advice_for_a_port_names_what_it_lacks() {
        let with = |device| Report { devices: vec![device], kernel_devices: vec!["x".into()], ..report() };
        assert_advice(&with(device(PortState::Down, &["fe80::1"])), "not active (Down)");
        assert_advice(&with(device(PortState::Active, &[])), "no GID");
        assert_advice(&with(device(PortState::Active, &["fe80::1"])), "link-local");
        let broken =
            DeviceReport { problem: Some("ibv_alloc_pd: broken".into()), ..device(PortState::Active, &[]) };
        assert_advice(&with(broken), "ibv_alloc_pd");
        assert_eq!(advise(&with(device(PortState::Active, &["::ffff:10.0.0.1"]))), Vec::<String>::new());
    }
}
