//! The networks of cables, by which ranks choose their paths to each other.

use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

/// A network with addresses that ranks prefer, and this rank's RDMA device in it.
///
/// A cable is a network of its own, so the network tells two ranks which cable joins them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CableNetwork {
    /// The network's first address.
    pub address: Ipv4Addr,
    /// Leading bits that all its addresses share, 1 to 32.
    pub prefix: u8,
    /// This rank's device, if both ends of the cable have one.
    pub device: Option<String>,
}

impl CableNetwork {
    /// Whether `address` belongs to the network.
    pub fn contains(&self, address: &IpAddr) -> bool {
        let mask = u32::MAX << (32 - u32::from(self.prefix));
        matches!(address, IpAddr::V4(address) if address.to_bits() & mask == self.address.to_bits() & mask)
    }
}

impl FromStr for CableNetwork {
    type Err = String;

    /// Reads `ADDRESS/PREFIX` or `ADDRESS/PREFIX=DEVICE`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (network, device) = match text.split_once('=') {
            Some((network, device)) => (network, Some(device)),
            None => (text, None),
        };
        let parsed = network.split_once('/').and_then(|(address, prefix)| {
            Some((address.parse().ok()?, prefix.parse().ok().filter(|prefix| (1..=32).contains(prefix))?))
        });
        match (parsed, device) {
            (Some((address, prefix)), device) if device != Some("") => {
                Ok(Self { address, prefix, device: device.map(str::to_owned) })
            }
            _ => Err(format!("{text:?} is not a network such as 10.84.72.0/30 or 10.84.72.0/30=rdma_en2")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read_with_and_without_a_device() {
        let read = |text: &str| text.parse::<CableNetwork>();
        let cable = read("10.84.72.4/30=rdma_en2").unwrap();
        assert_eq!((cable.prefix, cable.device.as_deref()), (30, Some("rdma_en2")));
        let holds = |address: &str| cable.contains(&address.parse().unwrap());
        assert!(holds("10.84.72.6") && !holds("10.84.72.8") && !holds("fe80::1"));
        assert_eq!(read("192.168.1.0/24").unwrap().device, None);
        for wrong in ["", "10.84.72.4", "10.84.72.4/0", "10.84.72.4/33", "10.84.72/30", "10.0.0.0/8=", "::/3"]
        {
            assert!(read(wrong).unwrap_err().contains(wrong), "{wrong}");
        }
    }
}
