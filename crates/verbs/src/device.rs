//! Devices and their ports.

use crate::error::{Error, Result};
use crate::gid::{self, Gid, GidEntry};
use crate::interface;
use crate::library::Library;
use crate::profile::Profile;
use crate::sys::*;
use serde::Serialize;
use std::ffi::CStr;
use std::net::Ipv4Addr;
use std::ptr::NonNull;
use std::sync::Arc;

/// The devices that the library found when it was made.
pub struct DeviceList {
    library: &'static Library,
    raw: NonNull<*mut ibv_device>,
    names: Vec<String>,
}

impl DeviceList {
    /// Asks the library. An empty list is no error: `doctor` explains it.
    pub fn get() -> Result<Self> {
        let library = Library::get()?;
        let mut count = 0;
        // SAFETY: `count` is written; the list returned is released in drop.
        let raw = unsafe { (library.ibv_get_device_list)(&mut count) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last_os("ibv_get_device_list", library.path))?;
        let names = (0..usize::try_from(count).unwrap_or(0))
            // SAFETY: the list has `count` devices, each with a name that is a C string.
            .map(|i| unsafe { CStr::from_ptr((library.ibv_get_device_name)(*raw.as_ptr().add(i))) })
            .map(|name| name.to_string_lossy().into_owned())
            .collect();
        Ok(Self { library, raw, names })
    }

    /// The devices' names, in the library's order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Opens a device by its name.
    pub fn open(&self, name: &str, profile: Profile) -> Result<Arc<Context>> {
        let Some(index) = self.names.iter().position(|have| have == name) else {
            let present = if self.names.is_empty() { "none".to_string() } else { self.names.join(", ") };
            return Err(Error::NoDevice { wanted: name.to_string(), present });
        };
        // SAFETY: `index` is in the list, which lives until drop; the context outlives the list by the ABI's promise.
        let raw = unsafe { (self.library.ibv_open_device)(*self.raw.as_ptr().add(index)) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last_os("ibv_open_device", name))?;
        Context::new(self.library, raw, name, profile).map(Arc::new)
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: made by ibv_get_device_list, released once.
        unsafe { (self.library.ibv_free_device_list)(self.raw.as_ptr()) };
    }
}

/// An open device. Everything made on it holds it, so it is closed last.
pub struct Context {
    pub(crate) library: &'static Library,
    pub(crate) raw: NonNull<ibv_context>,
    pub(crate) profile: Profile,
    pub(crate) poll_cq: PollCq,
    pub(crate) post_send: PostSend,
    pub(crate) post_recv: PostRecv,
    name: String,
}

// SAFETY: the verbs calls may be made from any thread, several at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the device of this name with the native profile.
    pub fn open(name: &str) -> Result<Arc<Self>> {
        DeviceList::get()?.open(name, Profile::native())
    }

    fn new(
        library: &'static Library,
        raw: NonNull<ibv_context>,
        name: &str,
        profile: Profile,
    ) -> Result<Self> {
        // SAFETY: an open context begins with the fields declared in `sys`.
        let ops = unsafe { &(*raw.as_ptr()).ops };
        let (Some(poll_cq), Some(post_send), Some(post_recv)) = (ops.poll_cq, ops.post_send, ops.post_recv)
        else {
            // SAFETY: opened by the caller, not used after.
            unsafe { (library.ibv_close_device)(raw.as_ptr()) };
            let symbol = "ibv_context.ops.{poll_cq, post_send, post_recv}".to_string();
            let reason = format!("the driver of {name} left them empty");
            return Err(Error::LibraryUnusable { path: library.path.to_string(), symbol, reason });
        };
        Ok(Self { library, raw, profile, poll_cq, post_send, post_recv, name: name.to_string() })
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The rules that it is used by.
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// What the device says of itself.
    pub fn limits(&self) -> Result<DeviceLimits> {
        // SAFETY: all fields are integers, for which zero is a value.
        let mut raw: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, `raw` has the header's layout.
        let errno = unsafe { (self.library.ibv_query_device)(self.raw.as_ptr(), &mut raw) };
        if errno != 0 {
            return Err(Error::errno("ibv_query_device", &self.name, errno));
        }
        let firmware: Vec<u8> = raw.fw_ver.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
        Ok(DeviceLimits {
            firmware: String::from_utf8_lossy(&firmware).into_owned(),
            ports: raw.phys_port_cnt,
            queue_pairs: raw.max_qp.max(0) as u32,
            requests_per_queue: raw.max_qp_wr.max(0) as u32,
            regions: raw.max_mr.max(0) as u32,
            region_bytes: raw.max_mr_size,
        })
    }

    fn query_port(&self, number: u8) -> Result<ibv_port_attr> {
        // SAFETY: all fields are integers, for which zero is a value.
        let mut raw: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; the exported function fills the head of the header's struct, the rest stays 0.
        let errno = unsafe { (self.library.ibv_query_port)(self.raw.as_ptr(), number, &mut raw) };
        if errno != 0 {
            return Err(Error::errno("ibv_query_port", &format!("{} port {number}", self.name), errno));
        }
        Ok(raw)
    }

    /// A port's state alone, which takes one system call.
    pub fn port_state(&self, number: u8) -> Result<PortState> {
        self.query_port(number).map(|raw| PortState::from_raw(raw.state))
    }

    /// A port's state and addresses. Ports count from 1.
    pub fn port(&self, number: u8) -> Result<PortInfo> {
        let raw = self.query_port(number)?;
        let rows = u8::try_from(raw.gid_tbl_len.max(0)).unwrap_or(u8::MAX);
        Ok(PortInfo {
            number,
            state: PortState::from_raw(raw.state),
            active_mtu_bytes: mtu_bytes(raw.active_mtu),
            max_mtu_bytes: mtu_bytes(raw.max_mtu),
            rate_gbits: rate_gbits(raw.active_width, raw.active_speed),
            link_layer: LinkLayer::from_raw(raw.link_layer),
            max_message_bytes: raw.max_msg_sz,
            lid: raw.lid,
            gids: (0..rows).filter_map(|index| self.gid(number, index)).collect(),
        })
    }

    fn gid(&self, port: u8, index: u8) -> Option<GidEntry> {
        let mut raw = ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open, `raw` is 16 writable bytes. A row that cannot be read counts as empty.
        let failed =
            unsafe { (self.library.ibv_query_gid)(self.raw.as_ptr(), port, index.into(), &mut raw) } != 0;
        let gid = Gid::from_bytes(raw.raw);
        if failed || gid.is_zero() {
            return None;
        }
        let (interface, kind) = interface::of_gid(&self.name, port, index);
        Some(GidEntry { index, gid, kind, interface })
    }

    fn active_port(&self) -> Result<PortInfo> {
        let count = self.limits()?.ports;
        let mut told = Vec::new();
        for number in 1..=count {
            let port = self.port(number)?;
            if port.state.is_active() {
                return Ok(port);
            }
            told.push(format!("port {number} is {:?}", port.state));
        }
        Err(Error::NoActivePort { device: self.name.clone(), ports: told.join(", ") })
    }

    /// The IPv4 addresses of the first active port, each once.
    pub fn addresses(&self) -> Result<Vec<Ipv4Addr>> {
        let mut addresses: Vec<Ipv4Addr> =
            self.active_port()?.gids.iter().filter_map(|entry| entry.gid.ipv4()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        Ok(addresses)
    }

    /// The first active port, and the address on it that faces the peer (see [`gid::choose`]).
    pub fn choose_port(&self, facing: Option<Ipv4Addr>) -> Result<LocalPort> {
        let port = self.active_port()?;
        let Some(entry) = gid::choose(&port.gids, facing) else {
            let wanted = facing.map_or("any address".to_string(), |ip| ip.to_string());
            let present = port.gids.iter().map(|entry| entry.gid.to_string()).collect::<Vec<_>>().join(", ");
            let (device, port) = (self.name.clone(), port.number);
            return Err(Error::NoGid { device, port, wanted, present });
        };
        Ok(LocalPort {
            number: port.number,
            mtu_bytes: port.active_mtu_bytes,
            lid: port.lid,
            gid: entry.gid,
            gid_index: entry.index,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: open, and nothing made on it is left: each thing holds an Arc of it.
        unsafe { (self.library.ibv_close_device)(self.raw.as_ptr()) };
    }
}

/// What a device reports as its capacities. Apple's are larger than what it takes, see [`Profile`].
#[derive(Debug, Clone, Serialize)]
pub struct DeviceLimits {
    /// The firmware's version, often empty.
    pub firmware: String,
    /// How many ports it has.
    pub ports: u8,
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Outstanding requests per queue.
    pub requests_per_queue: u32,
    /// Memory regions.
    pub regions: u32,
    /// The largest region.
    pub region_bytes: u64,
}

/// The port and address that a queue pair is bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalPort {
    /// The port, from 1.
    pub number: u8,
    /// The active path MTU.
    pub mtu_bytes: u32,
    /// The local identifier (InfiniBand; 0 elsewhere).
    pub lid: u16,
    /// The address.
    pub gid: Gid,
    /// Its row in the port's table.
    pub gid_index: u8,
}

/// A port as the device describes it.
#[derive(Debug, Clone, Serialize)]
pub struct PortInfo {
    /// Its number, from 1.
    pub number: u8,
    /// Its state.
    pub state: PortState,
    /// The path MTU in use.
    pub active_mtu_bytes: u32,
    /// The largest path MTU.
    pub max_mtu_bytes: u32,
    /// Lanes times the rate of one, in Gbit/s; none when the device reports codes that the header does not have.
    pub rate_gbits: Option<f64>,
    /// What the cable carries.
    pub link_layer: LinkLayer,
    /// The longest message.
    pub max_message_bytes: u32,
    /// The local identifier (InfiniBand; 0 elsewhere).
    pub lid: u16,
    /// The rows of its address table that are in use.
    pub gids: Vec<GidEntry>,
}

/// `enum ibv_port_state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum PortState {
    Nop,
    Down,
    Init,
    Armed,
    Active,
    ActiveDefer,
    Unknown,
}

impl PortState {
    fn from_raw(number: i32) -> Self {
        [Self::Nop, Self::Down, Self::Init, Self::Armed, Self::Active, Self::ActiveDefer]
            .get(number as usize)
            .copied()
            .unwrap_or(Self::Unknown)
    }

    /// Packets flow.
    pub fn is_active(self) -> bool {
        matches!(self, Self::Active | Self::ActiveDefer)
    }
}

/// What a port's cable carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkLayer {
    /// InfiniBand, or a device that does not say.
    Infiniband,
    /// RoCE.
    Ethernet,
    /// Anything else, such as Thunderbolt.
    Other,
}

impl LinkLayer {
    fn from_raw(number: u8) -> Self {
        match number {
            0 | 1 => Self::Infiniband,
            2 => Self::Ethernet,
            _ => Self::Other,
        }
    }
}

/// `enum ibv_mtu` in bytes; a code that the header lacks counts as the smallest.
fn mtu_bytes(code: i32) -> u32 {
    if (1..=5).contains(&code) { 128 << code } else { 256 }
}

/// Bytes as `enum ibv_mtu`, rounded down to one that exists.
pub(crate) fn mtu_code(bytes: u32) -> i32 {
    (1..=5).rev().find(|code| bytes >= mtu_bytes(*code)).unwrap_or(1)
}

/// Width and speed codes of the InfiniBand specification.
fn rate_gbits(width: u8, speed: u8) -> Option<f64> {
    let lanes = match width {
        1 => 1.0,
        2 => 4.0,
        4 => 8.0,
        8 => 12.0,
        16 => 2.0,
        _ => return None,
    };
    let lane_gbits = match speed {
        1 => 2.5,
        2 => 5.0,
        4 | 8 => 10.0,
        16 => 14.0,
        32 => 25.0,
        64 => 50.0,
        128 => 100.0,
        _ => return None,
    };
    Some(lanes * lane_gbits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_codes_go_both_ways_and_round_down() {
        assert_eq!((1..=5).map(mtu_bytes).collect::<Vec<_>>(), [256, 512, 1024, 2048, 4096]);
        assert_eq!([0, 256, 1500, 4096, 9000].map(mtu_code), [1, 1, 3, 5, 5]);
    }

    #[test]
    fn rates_are_lanes_times_speed() {
        assert_eq!(rate_gbits(2, 32), Some(100.0));
        assert_eq!(rate_gbits(1, 128), Some(100.0));
        assert_eq!(rate_gbits(3, 32), None);
    }

    #[test]
    fn states_have_the_headers_numbers() {
        assert_eq!(PortState::from_raw(IBV_PORT_ACTIVE), PortState::Active);
        assert_eq!(PortState::from_raw(-1), PortState::Unknown);
        assert!(!PortState::from_raw(1).is_active());
    }
}
