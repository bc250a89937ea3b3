//! Known machines and links, not measured by us, with the source of each number.
//!
//! Memory bandwidth and arithmetic are figures of data sheets times the shares that engines reach,
//! which are stated here. Each machine's `source` names the source of each figure and the assumed
//! figures. They were checked on 2026-11-23: Apple's, AMD's and NVIDIA's pages mostly through pages
//! that quote them; links and the RTX 4090 were not checked. Measure your own machines (`thunder
//! bench report`).

use serde::Serialize;
use thunder_cost::{LinkSpeed, MachineSpeed};

const GIB: u64 = 1 << 30;

/// Share of a data sheet's memory bandwidth that decoding reaches. llama.cpp and MLX reach 0.7 to
/// 0.85 on Apple's chips (llama.cpp, discussion 4167); rocm_bandwidth_test reaches 212 of 256 GB/s,
/// 0.83, on Strix Halo (llm-tracker.info).
const BANDWIDTH_REACHED: f64 = 0.75;
/// Share of the arithmetic peak that prompts reach: 0.5 to 0.7 in the same measurements; hipBLASLt
/// reaches 36.9 of 59.4 TFLOP/s, 0.62, on Strix Halo (llm-tracker.info).
const ARITHMETIC_REACHED: f64 = 0.5;
/// Constant time of a step: launches and bookkeeping.
const FIXED_S: f64 = 300e-6;

/// A machine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Machine {
    /// Its name in questions.
    pub name: &'static str,
    /// Its name for people.
    pub title: &'static str,
    /// Bytes of memory for a model: the memory that the machine's GPU may use.
    pub memory_bytes: u64,
    /// The data sheet's memory bandwidth in bytes a second.
    pub memory_bytes_s: f64,
    /// Peak of 16-bit floating point, operations a second.
    pub peak_flops: f64,
    /// Watts when idle.
    pub idle_watts: f64,
    /// Watts when busy.
    pub busy_watts: f64,
    /// Sources of the numbers.
    pub source: &'static str,
}

impl Machine {
    /// The machine of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        MACHINES.iter().find(|machine| machine.name == name)
    }

    /// Its speeds for an engine.
    pub fn speed(&self) -> MachineSpeed {
        MachineSpeed {
            memory_bytes_s: self.memory_bytes_s * BANDWIDTH_REACHED,
            prompt_flops: self.peak_flops * ARITHMETIC_REACHED,
            decode_flops: self.peak_flops * ARITHMETIC_REACHED,
            attention_flops: None,
            fixed_s: FIXED_S,
            layer_s: 0.0,
            exchange: None,
        }
    }
}

/// A kind of link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Link {
    /// Its name in questions.
    pub name: &'static str,
    /// Its name for people.
    pub title: &'static str,
    /// Microseconds of a short message.
    pub latency_us: f64,
    /// Bytes a second.
    pub bytes_s: f64,
    /// Sources of the numbers.
    pub source: &'static str,
}

impl Link {
    /// The link of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        LINKS.iter().find(|link| link.name == name)
    }

    /// Its speeds for a group.
    pub fn speed(&self) -> LinkSpeed {
        LinkSpeed { latency_s: self.latency_us * 1e-6, bytes_s: self.bytes_s }
    }
}

const MINI: &str = "273 GB/s: apple.com/mac-mini/specs; memory: macOS's GPU limit of 75 %, of 2/3 up to 32 GB (llama.cpp, \
                    discussion 2182); FP16 peak: GPU cores x clock; 5 W idle, 140 W busy: support.apple.com/103253";
const STUDIO: &str = "546 GB/s (40-core GPU), 819 GB/s: support.apple.com/122211; memory: macOS's GPU limit of 75 % (llama.cpp, \
                      discussion 2182); FP16 peak (80-core GPU for M3 Ultra): twice FP32's 18.4 and 28.4 TFLOP/s \
                      (huggingface.co/hardware), less clock under load; 145 W, 270 W busy: support.apple.com/102027; idle \
                      watts assumed from that page's 9 to 13 W of earlier models";
const M5: &str = "153, 307, 614 GB/s: Apple's newsroom (M5 2025-10, M5 Pro and Max 2026-03); memory: macOS's GPU limit of 75 %, of \
                  2/3 up to 32 GB (llama.cpp, discussion 2182); FP16 peak: 4 x the M4 family's, Apple's claim for the GPU's neural \
                  accelerators; MLX measured up to 4.1 x for prompts on M5 (machinelearning.apple.com, 2025-11); watts assumed \
                  like the M4 family's";

const fn apple(
    name: &'static str,
    title: &'static str,
    memory_gib: u64,
    bandwidth_gb_s: f64,
    peak_tflops: f64,
    watts: [f64; 2],
    source: &'static str,
) -> Machine {
    Machine {
        name,
        title,
        memory_bytes: if memory_gib <= 32 { memory_gib * GIB / 3 * 2 } else { memory_gib * GIB / 4 * 3 },
        memory_bytes_s: bandwidth_gb_s * 1e9,
        peak_flops: peak_tflops * 1e12,
        idle_watts: watts[0],
        busy_watts: watts[1],
        source,
    }
}

/// All machines.
pub const MACHINES: [Machine; 13] = [
    apple("m4-pro-48", "Mac mini M4 Pro, 48 GB", 48, 273.0, 17.0, [5.0, 140.0], MINI),
    apple("m4-pro-64", "Mac mini M4 Pro, 64 GB", 64, 273.0, 17.0, [5.0, 140.0], MINI),
    apple("m4-max-64", "Mac Studio M4 Max, 64 GB", 64, 546.0, 34.0, [10.0, 145.0], STUDIO),
    apple("m4-max-128", "Mac Studio M4 Max, 128 GB", 128, 546.0, 34.0, [10.0, 145.0], STUDIO),
    apple("m3-ultra-96", "Mac Studio M3 Ultra, 96 GB", 96, 819.0, 57.0, [9.0, 270.0], STUDIO),
    apple("m3-ultra-256", "Mac Studio M3 Ultra, 256 GB", 256, 819.0, 57.0, [9.0, 270.0], STUDIO),
    apple("m3-ultra-512", "Mac Studio M3 Ultra, 512 GB", 512, 819.0, 57.0, [9.0, 270.0], STUDIO),
    apple("m5-32", "MacBook Pro M5, 32 GB", 32, 153.0, 34.0, [4.0, 70.0], M5),
    apple("m5-pro-64", "M5 Pro, 64 GB", 64, 307.0, 68.0, [5.0, 140.0], M5),
    apple("m5-max-128", "M5 Max, 128 GB", 128, 614.0, 136.0, [10.0, 145.0], M5),
    Machine {
        name: "dgx-spark",
        title: "NVIDIA DGX Spark, 128 GB",
        memory_bytes: 119 * GIB,
        memory_bytes_s: 273e9,
        peak_flops: 62e12,
        idle_watts: 35.0,
        busy_watts: 150.0,
        source: "273 GB/s, 1 PFLOP/s of sparse FP4: NVIDIA's data sheet; 119 GiB: CUDA's deviceQuery; FP16 with FP32 sums: 1/16 of \
                 the data sheet's figure, as A. Hannun and J. Carmack measured about 60 TFLOP/s (2025-10); busy watts: 123 to 150 \
                 measured (J. Geerling, kubesimplify), of a 240 W supply; idle watts assumed",
    },
    Machine {
        name: "strix-halo-128",
        title: "AMD Ryzen AI Max+ 395, 128 GB",
        memory_bytes: 110 * GIB,
        memory_bytes_s: 256e9,
        peak_flops: 59e12,
        idle_watts: 12.0,
        busy_watts: 140.0,
        source: "LPDDR5X-8000 of 256 bits, 40 compute units at 2.9 GHz: AMD's data sheet; 512 FP16 operations a clock: \
                 llm-tracker.info; 110 GiB: Linux's GTT limit raised (default half); 8 to 14 W idle, 133 to 160 W busy at the wall: \
                 servethehome.com (GMKtec EVO-X2), J. Geerling (Framework Desktop)",
    },
    Machine {
        name: "rtx-4090",
        title: "PC with an NVIDIA RTX 4090, 24 GB",
        memory_bytes: 23 * GIB,
        memory_bytes_s: 1008e9,
        peak_flops: 165e12,
        idle_watts: 70.0,
        busy_watts: 520.0,
        source: "NVIDIA's data sheet (dense FP16 with FP32 sums) and 70 W for the PC around it",
    },
];

/// All links.
pub const LINKS: [Link; 7] = [
    Link {
        name: "thunderbolt5-rdma",
        title: "Thunderbolt 5, RDMA",
        latency_us: 15.0,
        bytes_s: 6.5e9,
        source: "published measurements of JACCL on M3 Ultra: 5 to 20 us, about 50 to 60 Gbit/s of 80",
    },
    Link {
        name: "thunderbolt-ip",
        title: "Thunderbolt, IP",
        latency_us: 120.0,
        bytes_s: 3e9,
        source: "published measurements of TCP over Thunderbolt bridges",
    },
    Link {
        name: "roce-200",
        title: "200 Gbit/s RoCE (ConnectX-7)",
        latency_us: 5.0,
        bytes_s: 12e9,
        source: "DGX Spark's port reaches about 100 Gbit/s a PCIe link (NVIDIA's forum); verbs latency of 2 to 5 us",
    },
    Link {
        name: "ethernet-100",
        title: "100 Gbit/s Ethernet, TCP",
        latency_us: 30.0,
        bytes_s: 9e9,
        source: "line rate less overhead; latency of TCP between two tuned hosts",
    },
    Link {
        name: "ethernet-10",
        title: "10 Gbit/s Ethernet, TCP",
        latency_us: 50.0,
        bytes_s: 1.15e9,
        source: "line rate less overhead; latency of TCP through one switch",
    },
    Link {
        name: "usb4",
        title: "USB4 networking",
        latency_us: 100.0,
        bytes_s: 1.8e9,
        source: "published measurements of thunderbolt-net between two Strix Halo: 10 to 18 Gbit/s",
    },
    Link {
        name: "ethernet-2.5",
        title: "2.5 Gbit/s Ethernet, TCP",
        latency_us: 100.0,
        bytes_s: 0.29e9,
        source: "line rate less overhead; latency of TCP through one switch",
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_plausible_and_says_its_source() {
        for machine in &MACHINES {
            assert!((100e9..2e12).contains(&machine.memory_bytes_s), "{machine:?}");
            assert!(machine.memory_bytes > 16 * GIB && machine.source.len() > 20, "{machine:?}");
            assert!(machine.idle_watts < machine.busy_watts, "{machine:?}");
            assert_eq!(Machine::named(machine.name), Some(machine), "names are unique");
        }
        for link in &LINKS {
            assert!(link.latency_us > 1.0 && link.bytes_s > 0.1e9 && link.source.len() > 20, "{link:?}");
            assert_eq!(Link::named(link.name), Some(link), "names are unique");
        }
        assert!(Machine::named("m9").is_none() && Link::named("string").is_none());
    }
}
