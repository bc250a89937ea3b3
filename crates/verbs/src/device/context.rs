//! An open device.

use super::port::{LinkLayer, LocalPort, PortInfo, PortState, mtu_bytes, rate_gbits};
use crate::error::{Error, Result};
use crate::gid::{self, Gid, GidEntry};
use crate::interface;
use crate::library::Library;
use crate::profile::Profile;
use crate::sys::*;
use serde::Serialize;
use std::net::Ipv4Addr;
use std::ptr::NonNull;

/// An open device. Every object made on it holds a reference, so the device is closed last.
pub struct Context {
    pub(crate) library: &'static Library,
    pub(crate) raw: NonNull<ibv_context>,
    pub(crate) profile: Profile,
    pub(crate) poll_cq: PollCq,
    pub(crate) post_send: PostSend,
    pub(crate) post_recv: PostRecv,
    name: String,
}

// SAFETY: verbs calls are thread-safe, also when made at the same time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn new(
        library: &'static Library,
        raw: NonNull<ibv_context>,
        name: &str,
        profile: Profile,
    ) -> Result<Self> {
        // SAFETY: `raw` is an open context, which begins with the fields declared in `sys`.
        let ops = unsafe { &(*raw.as_ptr()).ops };
        let (Some(poll_cq), Some(post_send), Some(post_recv)) = (ops.poll_cq, ops.post_send, ops.post_recv)
        else {
            // SAFETY: the caller opened the context, and nothing uses it after this.
            unsafe { (library.ibv_close_device)(raw.as_ptr()) };
            let symbol = "ibv_context.ops.{poll_cq, post_send, post_recv}".to_string();
            let reason = format!("the driver of {name} does not set them");
            return Err(Error::LibraryUnusable { path: library.path.to_string(), symbol, reason });
        };
        Ok(Self { library, raw, profile, poll_cq, post_send, post_recv, name: name.to_string() })
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The rules by which the device is used.
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// The capacities that the device reports.
    pub fn limits(&self) -> Result<DeviceLimits> {
        // SAFETY: all fields are integers, for which zero is valid.
        let mut raw: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and `raw` has the layout of the C header.
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
        // SAFETY: all fields are integers, for which zero is valid.
        let mut raw: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open. The exported function fills the first part of the C struct;
        // the rest stays 0.
        let errno = unsafe { (self.library.ibv_query_port)(self.raw.as_ptr(), number, &mut raw) };
        if errno != 0 {
            return Err(Error::errno("ibv_query_port", &format!("{} port {number}", self.name), errno));
        }
        Ok(raw)
    }

    /// A port's state, which takes one system call.
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
        // A row that cannot be read counts as empty.
        // SAFETY: the context is open, and `raw` is 16 writable bytes.
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
        let mut states = Vec::new();
        for number in 1..=count {
            let port = self.port(number)?;
            if port.state.is_active() {
                return Ok(port);
            }
            states.push(format!("port {number} is {:?}", port.state));
        }
        Err(Error::NoActivePort { device: self.name.clone(), ports: states.join(", ") })
    }

    /// The IPv4 addresses of the first active port, each once.
    pub fn addresses(&self) -> Result<Vec<Ipv4Addr>> {
        let mut addresses: Vec<Ipv4Addr> =
            self.active_port()?.gids.iter().filter_map(|entry| entry.gid.ipv4()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        Ok(addresses)
    }

    /// The first active port, with the row of its GID table for `address` (see [`gid::choose`]).
    pub fn choose_port(&self, address: Option<Ipv4Addr>) -> Result<LocalPort> {
        let port = self.active_port()?;
        let Some(entry) = gid::choose(&port.gids, address) else {
            let wanted = address.map_or("any address".to_string(), |ip| ip.to_string());
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
        // SAFETY: the context is open. No object made on it exists any more, as each holds an Arc
        // of it.
        unsafe { (self.library.ibv_close_device)(self.raw.as_ptr()) };
    }
}

/// The capacities that a device reports. Apple's devices report more than they accept, see
/// [`Profile`].
#[derive(Debug, Clone, Serialize)]
pub struct DeviceLimits {
    /// Firmware version, often empty.
    pub firmware: String,
    /// Number of ports.
    pub ports: u8,
    /// Most queue pairs.
    pub queue_pairs: u32,
    /// Most outstanding requests per queue.
    pub requests_per_queue: u32,
    /// Most memory regions.
    pub regions: u32,
    /// Bytes of the largest region.
    pub region_bytes: u64,
}
