//! IPv4 networks, and the choice of unused networks.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An address with the length of its network's prefix.
///
/// ```
/// use thunder_cables::Network;
/// let cable: Network = "10.84.72.5/30".parse()?;
/// assert!(cable.overlaps(&"10.0.0.0/8".parse()?));
/// assert_eq!(cable.base().to_string(), "10.84.72.4/30");
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Network {
    /// The address: a machine's own, or the network's first.
    pub address: Ipv4Addr,
    /// Leading bits that all addresses of the network share, 0 to 32.
    pub prefix: u8,
}

impl Network {
    /// `None` if `prefix` is above 32.
    pub fn new(address: Ipv4Addr, prefix: u8) -> Option<Self> {
        (prefix <= 32).then_some(Self { address, prefix })
    }

    /// The mask's bits.
    pub fn mask(&self) -> u32 {
        // A shift by 32 bits would overflow: that network is the whole Internet.
        u32::MAX.checked_shl(32 - u32::from(self.prefix.min(32))).unwrap_or(0)
    }

    /// The mask as an address, for `ifconfig`.
    pub fn netmask(&self) -> Ipv4Addr {
        self.mask().into()
    }

    /// The network with its first address.
    pub fn base(&self) -> Self {
        Self { address: (self.address.to_bits() & self.mask()).into(), prefix: self.prefix }
    }

    /// Whether the two have an address in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        let mask = self.mask() & other.mask();
        self.address.to_bits() & mask == other.address.to_bits() & mask
    }

    /// Whether `address` belongs to the network.
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        self.overlaps(&Self { address, prefix: 32 })
    }

    /// The address number `index` of the network.
    fn host(&self, index: u32) -> Self {
        Self { address: (self.base().address.to_bits() + index).into(), prefix: self.prefix }
    }

    /// The two ends of a cable whose network this is.
    pub fn ends(&self) -> [Self; 2] {
        [self.host(1), self.host(2)]
    }

    /// Whether machines choose such addresses themselves if they get none.
    pub fn is_link_local(&self) -> bool {
        self.address.is_link_local()
    }
}

impl fmt::Display for Network {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.address, self.prefix)
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, prefix) = text.split_once('/').unwrap_or((text, "32"));
        address
            .parse()
            .ok()
            .zip(prefix.parse().ok())
            .and_then(|(address, prefix)| Self::new(address, prefix))
            .ok_or_else(|| format!("{text:?} is not a network such as 192.168.1.0/24"))
    }
}

impl Serialize for Network {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Prefix of a cable's network: two ends, and the two addresses that no machine may have.
pub const CABLE_PREFIX: u8 = 30;
/// Networks from which cables get theirs, in this order. Home routers give out 192.168.0, .1, .2,
/// .8, .86, .178 and 10.0.0; office networks and VPNs take low numbers of 10 and 172.16 first. No
/// network of the benchmark range 198.18 is here: proxies use it for addresses of their own.
const POOLS: [(u32, u32); 4] = [
    (0x0a54_4800, 256),  // 10.84.72.0/24 and on: "TH" in ASCII
    (0xac1d_5400, 40),   // 172.29.84.0/24 and on
    (0xc0a8_d500, 40),   // 192.168.213.0/24 and on
    (0x0a80_0000, 2048), // 10.128.0.0/24 and on
];
/// A route with fewer bits counts as a default route. VPNs send all traffic over two routes of one
/// bit; a cable's own network is longer and wins.
const SHORTEST_TAKEN_PREFIX: u8 = 8;

/// `count` networks for cables that overlap none of `used`, in a fixed order.
///
/// # Errors
/// Names a network that takes all of the private ranges.
pub fn choose(count: usize, used: &[Network]) -> Result<Vec<Network>, String> {
    let used: Vec<_> = used.iter().filter(|network| network.prefix >= SHORTEST_TAKEN_PREFIX).collect();
    let blocks = POOLS.iter().flat_map(|(first, count)| (0..*count).map(move |block| first + (block << 8)));
    let free = |network: &Network| !used.iter().any(|taken| taken.overlaps(network));
    let cables = |block: u32| {
        let network =
            move |index: u32| Network { address: (block + (index << 2)).into(), prefix: CABLE_PREFIX };
        (0..64).map(network)
    };
    let whole = |block: &u32| free(&Network { address: (*block).into(), prefix: 24 });
    let found: Vec<_> = blocks.clone().filter(whole).flat_map(cables).take(count).collect();
    if found.len() == count {
        return Ok(found);
    }
    // No block is completely free: pieces between other networks are used.
    let found: Vec<_> = blocks.flat_map(cables).filter(free).take(count).collect();
    if found.len() == count {
        return Ok(found);
    }
    let widest = used.iter().min_by_key(|network| network.prefix).map_or_else(String::new, |network| {
        format!("; the widest is {network}: remove that route, or leave the VPN that sets it, during setup")
    });
    Err(format!("{count} cables need private networks, and those in use leave only {}{widest}", found.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks(texts: &[&str]) -> Vec<Network> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn cables_share_a_block_that_is_free_as_a_whole() {
        let chosen = choose(3, &networks(&["192.168.1.7/24"])).unwrap();
        assert_eq!(chosen, networks(&["10.84.72.0/30", "10.84.72.4/30", "10.84.72.8/30"]));
        let chosen = choose(2, &networks(&["10.84.72.9/30"])).unwrap();
        assert_eq!(chosen, networks(&["10.84.73.0/30", "10.84.73.4/30"]), "nothing next to another network");
    }

    #[test]
    fn a_vpn_that_takes_ten_leaves_the_other_ranges() {
        let chosen = choose(1, &networks(&["10.0.0.0/8", "0.0.0.0/1", "0.0.0.0/0"])).unwrap();
        assert_eq!(chosen, networks(&["172.29.84.0/30"]));
    }

    #[test]
    fn without_a_free_network_the_widest_is_named() {
        let error = choose(1, &networks(&["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"])).unwrap_err();
        assert!(error.contains("10.0.0.0/8"), "{error}");
    }

    #[test]
    fn pieces_are_taken_when_no_block_is_free() {
        let mut used = networks(&["10.0.0.0/9", "172.16.0.0/12", "192.168.0.0/16"]);
        // All blocks of 10.128.0.0/9 have a network in their middle.
        used.extend(
            (0..2048u32)
                .map(|block| Network { address: (0x0a80_0000 + (block << 8) + 128).into(), prefix: 28 }),
        );
        assert_eq!(choose(1, &used).unwrap(), networks(&["10.128.0.0/30"]));
    }

    #[test]
    fn masks_of_all_lengths() {
        let network = |text: &str| text.parse::<Network>().unwrap();
        assert_eq!(network("1.2.3.4/0").mask(), 0);
        assert_eq!(network("1.2.3.4").mask(), u32::MAX);
        assert_eq!(network("1.2.3.4/30").netmask(), Ipv4Addr::new(255, 255, 255, 252));
        for wrong in ["1.2.3.4/33", "1.2.3/8", "", "1.2.3.4/", "::1/8"] {
            assert!(wrong.parse::<Network>().unwrap_err().contains(wrong), "{wrong}");
        }
    }
}
