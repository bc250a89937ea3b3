//! Ports of a device: state, speed, addresses.

use crate::gid::{Gid, GidEntry};
use serde::Serialize;

/// The port and the address that a queue pair uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalPort {
    /// The port's number, from 1.
    pub number: u8,
    /// The active path MTU in bytes.
    pub mtu_bytes: u32,
    /// The local identifier on InfiniBand; 0 elsewhere.
    pub lid: u16,
    /// The address.
    pub gid: Gid,
    /// The address's row in the port's GID table.
    pub gid_index: u8,
}

/// A port, as the device reports it.
#[derive(Debug, Clone, Serialize)]
pub struct PortInfo {
    /// The port's number, from 1.
    pub number: u8,
    /// The port's state.
    pub state: PortState,
    /// The path MTU in use, in bytes.
    pub active_mtu_bytes: u32,
    /// The largest path MTU, in bytes.
    pub max_mtu_bytes: u32,
    /// The rate in Gbit/s: lanes times the rate of one lane. `None` if the device reports unknown
    /// codes.
    pub rate_gbits: Option<f64>,
    /// The protocol on the cable.
    pub link_layer: LinkLayer,
    /// The longest message, in bytes.
    pub max_message_bytes: u32,
    /// The local identifier on InfiniBand; 0 elsewhere.
    pub lid: u16,
    /// The used rows of the port's GID table.
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
    pub(super) fn from_raw(number: i32) -> Self {
        [Self::Nop, Self::Down, Self::Init, Self::Armed, Self::Active, Self::ActiveDefer]
            .get(number as usize)
            .copied()
            .unwrap_or(Self::Unknown)
    }

    /// True if packets flow.
    pub fn is_active(self) -> bool {
        matches!(self, Self::Active | Self::ActiveDefer)
    }
}

/// The protocol on a port's cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkLayer {
    /// InfiniBand, or not reported.
    Infiniband,
    /// RoCE.
    Ethernet,
    /// Any other, such as Thunderbolt.
    Other,
}

impl LinkLayer {
    pub(super) fn from_raw(number: u8) -> Self {
        match number {
            0 | 1 => Self::Infiniband,
            2 => Self::Ethernet,
            _ => Self::Other,
        }
    }
}

/// `enum ibv_mtu` in bytes. An unknown code counts as the smallest MTU.
pub(super) fn mtu_bytes(code: i32) -> u32 {
    if (1..=5).contains(&code) { 128 << code } else { 256 }
}

/// The `enum ibv_mtu` code of the largest MTU that is at most `bytes`.
pub(crate) fn mtu_code(bytes: u32) -> i32 {
    (1..=5).rev().find(|code| bytes >= mtu_bytes(*code)).unwrap_or(1)
}

/// The rate in Gbit/s of the InfiniBand specification's width and speed codes.
pub(super) fn rate_gbits(width: u8, speed: u8) -> Option<f64> {
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
    fn mtu_codes_convert_both_ways_and_round_down() {
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
    fn port_states_have_the_c_headers_numbers() {
        assert_eq!(PortState::from_raw(crate::sys::IBV_PORT_ACTIVE), PortState::Active);
        assert_eq!(PortState::from_raw(-1), PortState::Unknown);
        assert!(!PortState::from_raw(1).is_active());
    }
}
