//! The RDMA cables that `tools/rdma-vm/run` creates, from the file that it writes. Its lines are
//! "RANK PEER CABLE DEVICE IP PEER_DEVICE PEER_IP".

use std::collections::BTreeMap;

/// One end of a cable.
pub struct End {
    pub rank: usize,
    pub peer: usize,
    pub cable: usize,
    pub device: String,
    pub peer_device: String,
    pub peer_ip: String,
}

/// All ends of cables; none on other machines.
pub fn ends() -> Vec<End> {
    let Ok(path) = std::env::var("RDMA_LINKS") else { return Vec::new() };
    let text = std::fs::read_to_string(&path).expect("the file of cables is readable");
    let end = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse().expect("a number");
        let word = |at: usize| words[at].to_owned();
        End {
            rank: number(0),
            peer: number(1),
            cable: number(2),
            device: word(3),
            peer_device: word(5),
            peer_ip: word(6),
        }
    };
    text.lines().map(end).collect()
}

/// A rank's devices towards each other rank of a group of `ranks`, with `cables` per pair.
pub fn devices(rank: usize, ranks: usize, cables: usize) -> BTreeMap<usize, Vec<String>> {
    let mut devices: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for end in ends().into_iter().filter(|end| end.rank == rank && end.peer < ranks && end.cable < cables) {
        devices.entry(end.peer).or_default().push(end.device);
    }
    devices
}

/// The device file of a group of `ranks` with one cable per pair.
pub fn device_file(ranks: usize) -> String {
    let row = |rank| -> Vec<Option<Vec<String>>> {
        let devices = devices(rank, ranks, 1);
        (0..ranks).map(|peer| devices.get(&peer).cloned()).collect()
    };
    serde_json::to_string(&(0..ranks).map(row).collect::<Vec<_>>()).expect("names are text")
}
