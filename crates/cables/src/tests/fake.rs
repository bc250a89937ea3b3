//! A Mac that exists only as the state that its commands show and change.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Value, json};

use crate::job::{LABEL, Paths};
use crate::machine::System;
use crate::network::Network;

/// A Mac's state. Equal states are what "undone exactly" means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FakeMac {
    pub name: String,
    pub version: String,
    pub model: String,
    pub chip: String,
    pub memory_gib: u64,
    /// What `rdma_ctl status` says; `None` if there is no such command.
    pub rdma: Option<String>,
    pub thunderbolt: String,
    /// Hardware ports and devices.
    pub hardware: Vec<(String, String)>,
    /// RDMA devices, and whether their ports are active.
    pub devices: Vec<(String, bool)>,
    pub interfaces: Vec<FakeInterface>,
    /// Members of bridge0.
    pub members: Vec<String>,
    pub routes: Vec<Network>,
    pub gpu_mib: u64,
    /// Metal's default; `None` if Metal cannot be asked.
    pub working_set: Option<u64>,
    /// `SSH_CONNECTION`; empty if it is not reached over ssh.
    pub reached: String,
    pub low_power: bool,
    pub firewall: bool,
    pub remote_login: bool,
    pub job: bool,
    pub folder: bool,
    pub files: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FakeInterface {
    pub name: String,
    pub mac: String,
    pub up: bool,
    pub active: bool,
    pub mtu: u32,
    pub addresses: Vec<Network>,
}

/// What is plugged into a port: the other end's UUID and Gbit/s, and the name and model there.
pub type Plug = Option<(String, u32, &'static str)>;

/// One port for [`FakeMac::new`].
pub struct FakePort {
    pub uuid: String,
    pub most: u32,
    pub plug: Plug,
}

impl FakeMac {
    /// A Mac on Wi-Fi or Ethernet (`en0`), with all Thunderbolt interfaces in the bridge, as macOS
    /// sets up a new one. Port N is `en(N+1)`.
    pub fn new(name: &str, number: usize, chip: &str, ports: &[FakePort]) -> Self {
        let device = |port: usize| format!("en{}", port + 2);
        let has_rdma = ports.iter().any(|port| port.most > 40);
        let interface = |name: String, active: bool, address: Option<String>| FakeInterface {
            mac: format!(
                "82:00:00:00:{number:02x}:{:02x}",
                name.len() + name.bytes().last().map_or(0, usize::from)
            ),
            name,
            up: true,
            active,
            mtu: 1500,
            addresses: address.into_iter().map(|address| address.parse().unwrap()).collect(),
        };
        let mut interfaces =
            vec![interface("en0".to_owned(), true, Some(format!("192.168.1.{}/24", 10 + number)))];
        interfaces
            .extend((0..ports.len()).map(|port| interface(device(port), ports[port].plug.is_some(), None)));
        let mut hardware = vec![("Ethernet".to_owned(), "en0".to_owned())];
        hardware.extend((0..ports.len()).map(|port| (format!("Thunderbolt {}", port + 1), device(port))));
        hardware.push(("Thunderbolt Bridge".to_owned(), "bridge0".to_owned()));
        let rdma_device = |port: usize| (format!("rdma_{}", device(port)), ports[port].plug.is_some());
        Self {
            name: name.to_owned(),
            version: "26.3".to_owned(),
            model: "Mac15,14".to_owned(),
            chip: chip.to_owned(),
            memory_gib: 512,
            rdma: has_rdma.then(|| "enabled".to_owned()),
            thunderbolt: profile(ports),
            hardware,
            devices: if has_rdma { (0..ports.len()).map(rdma_device).collect() } else { Vec::new() },
            interfaces,
            members: (0..ports.len()).map(device).collect(),
            routes: vec!["192.168.1.0/24".parse().unwrap()],
            gpu_mib: 0,
            working_set: None,
            reached: String::new(),
            low_power: true,
            firewall: false,
            remote_login: true,
            job: false,
            folder: false,
            files: BTreeMap::new(),
        }
    }

    /// What the probe prints.
    pub fn transcript(&self) -> String {
        let mut text = String::new();
        let mut section = |name: &str, status: i32, out: &str| {
            let _ = writeln!(text, "@@ {name} {status}\n{out}");
        };
        section("system", 0, "Darwin");
        section("name", 0, &self.name);
        section("version", 0, &self.version);
        section("reached", 0, &self.reached);
        section("sysctl", 0, &self.sysctl());
        let metal = self.metal();
        section("gpu", if metal.is_some() { 0 } else { 127 }, &metal.unwrap_or_default());
        section("rdma", if self.rdma.is_some() { 0 } else { 127 }, self.rdma.as_deref().unwrap_or(""));
        section("thunderbolt", 0, &self.thunderbolt);
        section("ports", 0, &self.hardware_ports());
        section("interfaces", 0, &self.ifconfig());
        section("routes", 0, &self.netstat());
        section("devices", 0, &self.ibv_devices());
        section("device-states", 0, &self.ibv_devinfo());
        section("power", 0, &self.pmset());
        section("firewall", 0, self.firewall_state());
        section("services", 0, &self.services());
        section("job", if self.job { 0 } else { 113 }, "");
        section("job-folder", i32::from(!self.folder), "");
        let paths = Paths::of(&System::Macos { version: String::new() }).unwrap();
        for (name, path) in
            [("job-script", paths.script), ("job-unit", paths.unit), ("job-cables", paths.cables)]
        {
            let file = self.files.get(path);
            section(name, i32::from(file.is_none()), file.map_or("", |text| text.trim_end_matches('\n')));
        }
        for (port, device) in &self.hardware {
            if port.starts_with("Thunderbolt ") && !device.starts_with("bridge") {
                section(&format!("mtu:{device}"), 0, "Valid MTU Range: 1280-9000");
            }
        }
        section("end", 0, "");
        text
    }

    pub fn sysctl(&self) -> String {
        format!(
            "hw.model: {}\nmachdep.cpu.brand_string: {}\nhw.memsize: {}\niogpu.wired_limit_mb: {}",
            self.model,
            self.chip,
            self.memory_gib << 30,
            self.gpu_mib
        )
    }

    /// What Metal says: the limit that is set, else the default.
    fn metal(&self) -> Option<String> {
        let bytes = if self.gpu_mib == 0 { self.working_set? } else { self.gpu_mib << 20 };
        Some(bytes.to_string())
    }

    pub fn hardware_ports(&self) -> String {
        let port = |(name, device): &(String, String)| {
            format!("\nHardware Port: {name}\nDevice: {device}\nEthernet Address: 02:00:00:00:00:01\n")
        };
        self.hardware.iter().map(port).collect()
    }

    pub fn ifconfig(&self) -> String {
        let mut text =
            "lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384\n\tinet 127.0.0.1 netmask 0xff000000\n"
                .to_owned();
        for interface in &self.interfaces {
            let up = if interface.up { "UP," } else { "" };
            let member = if self.members.contains(&interface.name) { "PROMISC," } else { "" };
            let _ = writeln!(
                text,
                "{}: flags=8863<{up}BROADCAST,SMART,RUNNING,{member}SIMPLEX,MULTICAST> mtu {}\n\tether {}",
                interface.name, interface.mtu, interface.mac
            );
            for address in &interface.addresses {
                let _ = writeln!(text, "\tinet {} netmask 0x{:08x}", address.address, address.mask());
            }
            let _ = writeln!(text, "\tstatus: {}", if interface.active { "active" } else { "inactive" });
        }
        text.push_str("bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500\n");
        for member in &self.members {
            let _ = writeln!(text, "\tmember: {member} flags=3<LEARNING,DISCOVER>");
        }
        text
    }

    pub fn netstat(&self) -> String {
        let mut text = "Routing tables\n\nInternet:\nDestination        Gateway            Flags               Netif Expire\n\
                        default            192.168.1.1        UGScg                 en0\n127                127.0.0.1          UCS                   lo0\n"
            .to_owned();
        for route in &self.routes {
            let _ = writeln!(
                text,
                "{}/{}          link#6             UCS                   en0",
                route.base().address,
                route.prefix
            );
        }
        text
    }

    pub fn ibv_devices(&self) -> String {
        let mut text =
            "    device          \t   node GUID\n    ------          \t----------------\n".to_owned();
        for (name, _) in &self.devices {
            let _ = writeln!(text, "    {name}        \te0c5797d9c8fac05");
        }
        text
    }

    pub fn ibv_devinfo(&self) -> String {
        let state = |active: bool| if active { "PORT_ACTIVE (4)" } else { "PORT_DOWN (1)" };
        let device = |(name, active): &(String, bool)| {
            format!(
                "hca_id:\t{name}\n\ttransport:\t\t\tThunderbolt (100)\n\t\tport:\t1\n\t\t\tstate:\t\t\t{}\n\n",
                state(*active)
            )
        };
        self.devices.iter().map(device).collect()
    }

    pub fn pmset(&self) -> String {
        format!("AC Power:\n sleep                1\n lowpowermode         {}", u8::from(self.low_power))
    }

    pub fn firewall_state(&self) -> &'static str {
        if self.firewall { "Firewall is enabled. (State = 1)" } else { "Firewall is disabled. (State = 0)" }
    }

    /// `launchctl print-disabled system`.
    pub fn services(&self) -> String {
        let state = if self.remote_login { "enabled" } else { "disabled" };
        format!("\tdisabled services = {{\n\t\t\"com.openssh.sshd\" => {state}\n\t}}")
    }

    /// Runs a command of ours, as macOS would. Returns the status and the error.
    pub fn run(&mut self, words: &[&str], input: &str) -> (i32, String) {
        let missing = |name: &str| (1, format!("ifconfig: interface {name} does not exist"));
        let find =
            |mac: &mut Self, name: &str| mac.interfaces.iter().position(|interface| interface.name == name);
        match words {
            ["ifconfig", "bridge0", "deletem", member] => {
                match self.members.iter().position(|name| name == member) {
                    Some(index) => drop(self.members.remove(index)),
                    None => return (1, format!("ifconfig: BRDGDEL {member}: No such file or directory")),
                }
            }
            ["ifconfig", "bridge0", "addm", member] => {
                if find(self, member).is_none() || self.members.iter().any(|name| name == member) {
                    return (1, format!("ifconfig: BRDGADD {member}: Device busy"));
                }
                self.members.push((*member).to_owned());
                self.members.sort();
            }
            ["ifconfig", name, rest @ ..] => {
                let Some(index) = find(self, name) else { return missing(name) };
                return self.interfaces[index].change(rest);
            }
            ["sysctl", setting] => {
                self.gpu_mib = setting.strip_prefix("iogpu.wired_limit_mb=").unwrap().parse().unwrap();
            }
            ["pmset", "-c", "lowpowermode", mode] => self.low_power = *mode == "1",
            ["launchctl", "bootstrap", "system", unit] => {
                if self.job || !self.files.contains_key(*unit) {
                    return (5, "Bootstrap failed: 5: Input/output error".to_owned());
                }
                self.job = true;
            }
            ["launchctl", "bootout", job] => {
                assert_eq!(*job, format!("system/{LABEL}"));
                if !std::mem::take(&mut self.job) {
                    return (3, "Boot-out failed: 3: No such process".to_owned());
                }
            }
            ["mkdir", "-p", _] => self.folder = true,
            ["rmdir", _] if self.folder => self.folder = false,
            ["tee", path, ">/dev/null"] => drop(self.files.insert((*path).to_owned(), input.to_owned())),
            ["chmod", _, path] if self.files.contains_key(*path) => {}
            ["rm", "-f", path] => drop(self.files.remove(*path)),
            _ => return (127, format!("sh: {words:?}: not found")),
        }
        (0, String::new())
    }

    /// Writes the state as a folder for `double.sh`.
    pub fn write_to(&self, folder: &Path) {
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("name", &format!("{}\n", self.name));
        write("version", &format!("{}\n", self.version));
        write("sysctl", &format!("{}\n", self.sysctl().rsplit_once('\n').unwrap().0));
        write("gpu", &format!("{}\n", self.gpu_mib));
        if let Some(bytes) = self.working_set {
            write("working-set", &format!("{bytes}\n"));
        }
        write("reached", &format!("{}\n", self.reached));
        if let Some(rdma) = &self.rdma {
            write("rdma", &format!("{rdma}\n"));
        }
        write("thunderbolt.json", &self.thunderbolt);
        write("ports", &self.hardware_ports());
        write("routes", &self.netstat());
        write("devices", &self.ibv_devices());
        write("states", &self.ibv_devinfo());
        write("power", &format!("{}\n", self.pmset()));
        write("firewall", &format!("{}\n", self.firewall_state()));
        write("services", &format!("{}\n", self.services()));
        write("members", &self.members.iter().map(|member| format!("{member}\n")).collect::<String>());
        std::fs::create_dir_all(folder.join("root/Library/LaunchDaemons")).unwrap();
        std::fs::create_dir_all(folder.join("root/Library/Application Support")).unwrap();
        self.interfaces.iter().for_each(|interface| interface.write_to(folder));
    }
}

impl FakeInterface {
    /// Writes the interface into the folder of its Mac.
    pub fn write_to(&self, mac: &Path) {
        let folder = mac.join("interfaces").join(&self.name);
        std::fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        write("mtu", &format!("{}\n", self.mtu));
        write("mac", &format!("{}\n", self.mac));
        write("status", if self.active { "active\n" } else { "inactive\n" });
        write("flags", if self.up { "UP,\n" } else { "\n" });
        let inet = |address: &Network| format!("{} 0x{:08x}\n", address.address, address.mask());
        write("inet", &self.addresses.iter().map(inet).collect::<String>());
    }

    fn change(&mut self, words: &[&str]) -> (i32, String) {
        match words {
            ["up"] => self.up = true,
            ["down"] => self.up = false,
            ["mtu", mtu] => self.mtu = mtu.parse().unwrap(),
            ["inet", address, "netmask", mask, "alias"] => {
                let mask: std::net::Ipv4Addr = mask.parse().unwrap();
                let prefix = mask.to_bits().leading_ones() as u8;
                self.addresses.push(Network::new(address.parse().unwrap(), prefix).unwrap());
            }
            ["inet", address, "-alias"] => {
                let address: std::net::Ipv4Addr = address.parse().unwrap();
                match self.addresses.iter().position(|own| own.address == address) {
                    Some(index) => drop(self.addresses.remove(index)),
                    None => {
                        return (
                            1,
                            "ifconfig: ioctl (SIOCDIFADDR): Can't assign requested address".to_owned(),
                        );
                    }
                }
            }
            _ => return (1, format!("ifconfig: {words:?}: bad value")),
        }
        (0, String::new())
    }
}

/// `system_profiler SPThunderboltDataType -json`, in the shape of the recorded ones.
pub fn profile(ports: &[FakePort]) -> String {
    let bus = |(index, port): (usize, &FakePort)| -> Value {
        let speed = port
            .plug
            .as_ref()
            .map_or_else(|| format!("Up to {} Gb/s", port.most), |(_, gbits, _)| format!("{gbits} Gb/s"));
        let status =
            if port.plug.is_some() { "receptacle_connected" } else { "receptacle_no_devices_connected" };
        let mut bus = json!({
            "_name": format!("thunderboltusb4_bus_{index}"),
            "device_name_key": "Mac Studio",
            "domain_uuid_key": port.uuid,
            "receptacle_1_tag": {
                "current_speed_key": speed,
                "link_status_key": if port.plug.is_some() { "0x2" } else { "0x100" },
                "receptacle_id_key": (index + 1).to_string(),
                "receptacle_status_key": status,
            },
            "route_string_key": "0",
            "vendor_name_key": "Apple Inc.",
        });
        if let Some((uuid, _, model)) = &port.plug {
            bus["_items"] = json!([{
                "_name": "Mac Studio", "device_id_key": "0xA", "device_name_key": model, "domain_uuid_key": uuid,
                "services_title": [{ "_name": "service_ip", "protocol_id_key": 1 }],
                "vendor_id_key": "0x0A27", "vendor_name_key": "Apple Inc.",
            }]);
        }
        bus
    };
    // system_profiler lists buses from the last to the first.
    let buses: Vec<Value> = ports.iter().enumerate().rev().map(bus).collect();
    serde_json::to_string_pretty(&json!({ "SPThunderboltDataType": buses })).unwrap()
}
