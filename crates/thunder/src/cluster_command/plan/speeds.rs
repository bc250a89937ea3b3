//! What the nodes and their links give to a model, from what was measured.

use anyhow::bail;
use thunder_capacity::placement::{Exchange, LinkSpeed, MachineSpeed, Node, Shared};
use thunder_engine::assembly::assemble::STEP_ROWS;
use thunder_engine::assembly::device::DeviceChoice;
use thunder_engine::assembly::memory::DeviceMemory;
use thunder_model::ModelFolder;
use thunder_model::spec::FeedForwardSpec;
use thunder_node::agent::{LinkStatus, MemberStatus, Status};
use thunder_node::report::{GpuReport, HostWayReport, SpeedReport};

/// Part of the memory's bandwidth that products with unpacked weights reach.
const UNPACKED_REACHED: f64 = 0.9;
/// Bits of a weight up to which the measured product with 4-bit weights stands for others.
const FEW_BITS: f64 = 5.0;
/// Jobs for all threads in a layer, and in a step besides.
const JOBS_PER_LAYER: f64 = 8.0;
/// What a GPU's layer takes, in kernels that read hardly anything: four products, and attention,
/// which takes as long as three. With experts there are 13 dispatches (docs/gpu.md).
const KERNELS_PER_LAYER: f64 = 7.0;
const KERNELS_WITH_EXPERTS: f64 = 15.0;
/// Seconds of a step for the sampler and for what rank 0 tells the others.
const STEP_S: f64 = 60e-6;

/// The GPU that a node's rank takes with this `--device`; `None`: the processor. An error says why
/// the node cannot run such a rank.
fn gpu_of(report: &SpeedReport, choice: DeviceChoice) -> Result<Option<&GpuReport>, String> {
    match (choice, report.gpu.as_ref()) {
        (DeviceChoice::Cpu, _) => Ok(None),
        (DeviceChoice::Auto, gpu) => Ok(gpu),
        (_, None) => Err("has no GPU".to_owned()),
        (DeviceChoice::Numbered(number), Some(gpu)) if gpu.number as usize != number => Err(format!(
            "has measured {gpu}: THUNDER_DEVICE=gpu:{number} in its agent's environment measures gpu:{number}"
        )),
        (_, gpu) => Ok(gpu),
    }
}

/// The nodes that run ranks with this `--device`, and what they give for this model.
///
/// # Errors
/// When none has the device, or one has not told how fast it is.
pub fn nodes<'a>(
    members: Vec<&'a MemberStatus>,
    folder: &ModelFolder,
    choice: DeviceChoice,
) -> anyhow::Result<(Vec<&'a MemberStatus>, Vec<Node>)> {
    let (mut able, mut nodes, mut unable) = (Vec::new(), Vec::new(), Vec::new());
    for member in members {
        match node(member, folder, choice) {
            Ok(node) => {
                able.push(member);
                nodes.push(node);
            }
            Err(why) => unable.push(format!("{} {why}", member.name)),
        }
    }
    // A rank would end at once on a node without the GPU that it is told to take.
    let is_required = matches!(choice, DeviceChoice::Auto | DeviceChoice::Cpu);
    if able.is_empty() || (is_required && !unable.is_empty()) {
        bail!("no plan with --device {choice}: {}", unable.join("; "));
    }
    for (place, node) in nodes.iter_mut().enumerate() {
        node.shared = shared(&able, place, folder, choice);
    }
    Ok((able, nodes))
}

/// What a node gives for this model, or why nothing.
fn node(member: &MemberStatus, folder: &ModelFolder, choice: DeviceChoice) -> Result<Node, String> {
    let known = member.report.as_ref().and_then(|report| Some((report, report.speed.as_ref()?)));
    let (report, speed) = known.ok_or("has not said how fast it is: is it of an older version?")?;
    Ok(match gpu_of(speed, choice)? {
        None => Node {
            name: member.name.clone(),
            speed: processor(speed, folder),
            shared: None,
            memory_bytes: report.memory_free,
            device_memory: DeviceMemory::default(),
            device: "cpu".to_owned(),
            step_rows: STEP_ROWS,
        },
        Some(gpu) => Node {
            name: member.name.clone(),
            speed: of_gpu(gpu, folder),
            shared: None,
            memory_bytes: report.gpu_memory(gpu),
            device_memory: of_memory(gpu),
            device: gpu.to_string(),
            step_rows: (gpu.step_rows as usize).max(1),
        },
    })
}

/// What a GPU keeps besides weights and caches, and its limits.
fn of_memory(gpu: &GpuReport) -> DeviceMemory {
    DeviceMemory {
        bytes: None,
        largest_buffer: (gpu.largest_buffer > 0).then_some(gpu.largest_buffer),
        other_states: gpu.other_states as usize,
        expert_bytes: gpu.expert_bytes,
    }
}

/// What the node at a place gets of a machine on which others of the nodes run too; `None` if there
/// are none, or if its version does not measure this.
fn shared(
    members: &[&MemberStatus],
    place: usize,
    folder: &ModelFolder,
    choice: DeviceChoice,
) -> Option<Shared> {
    // Nodes of a machine share the GPU that they have measured, and those that ranks of a group
    // take in turn with it; the others share the processor.
    let kind_of = |member: &MemberStatus| {
        let report = member.report.as_ref()?;
        let gpu = gpu_of(report.speed.as_ref()?, choice).ok()?;
        Some((report.boot.clone()?, gpu.map(|gpu| gpu.number)))
    };
    let kind = kind_of(members[place])?;
    let same: Vec<usize> =
        (0..members.len()).filter(|other| kind_of(members[*other]).as_ref() == Some(&kind)).collect();
    let report = members[place].report.as_ref()?;
    let (machine, memories, together) = match gpu_of(report.speed.as_ref()?, choice).ok()? {
        _ if same.len() < 2 => return None,
        None => (same[0], 1, processor(&report.together.as_ref()?.speed, folder)),
        Some(gpu) => {
            let gpus = (gpu.count as usize).max(1);
            (same[0], gpus, in_turn(&of_gpu(gpu, folder), gpus, same.len()))
        }
    };
    Some(Shared { machine, memories, together })
}

/// What each of `nodes` nodes gets of `gpus` GPUs like this one while all compute: several on one
/// take turns.
fn in_turn(speed: &MachineSpeed, gpus: usize, nodes: usize) -> MachineSpeed {
    let turns = nodes.div_ceil(gpus) as f64;
    MachineSpeed {
        memory_bytes_s: speed.memory_bytes_s / turns,
        prompt_flops: speed.prompt_flops / turns,
        decode_flops: speed.decode_flops / turns,
        layer_s: speed.layer_s * turns,
        ..*speed
    }
}

/// What a processor of this speed gives for this model.
fn processor(speed: &SpeedReport, folder: &ModelFolder) -> MachineSpeed {
    let spec = &folder.spec;
    let weights = (spec.layer_weights() + (spec.vocab * spec.hidden) as u64).max(1);
    let bits = folder.weights.bytes() as f64 * 8.0 / weights as f64;
    let unpacked = speed.memory_bytes_s as f64 * UNPACKED_REACHED;
    // A cache may hold what a short measurement reads.
    let packed = speed.weight_bytes_s.min(speed.memory_bytes_s) as f64;
    let layer_s = JOBS_PER_LAYER * speed.job_ns as f64 * 1e-9;
    MachineSpeed {
        memory_bytes_s: if bits > FEW_BITS { unpacked.max(packed) } else { packed }.max(1.0),
        prompt_flops: (speed.prompt_flops as f64).max(1.0),
        decode_flops: (speed.decode_flops as f64).max(1.0),
        attention_flops: (speed.attention_flops > 0).then_some(speed.attention_flops as f64),
        fixed_s: STEP_S + layer_s,
        layer_s,
        exchange: None,
    }
}

/// What a GPU of this speed gives for this model.
fn of_gpu(gpu: &GpuReport, folder: &ModelFolder) -> MachineSpeed {
    let layers = &folder.spec.layers;
    let is_routed = |feed_forward: &FeedForwardSpec| {
        matches!(feed_forward, FeedForwardSpec::Experts(_) | FeedForwardSpec::Both(_))
    };
    let routed = layers.iter().filter(|layer| is_routed(&layer.feed_forward)).count() as f64;
    let share = routed / layers.len().max(1) as f64;
    let kernels = KERNELS_PER_LAYER * (1.0 - share) + KERNELS_WITH_EXPERTS * share;
    let way = |way: HostWayReport| LinkSpeed {
        latency_s: way.latency_ns as f64 * 1e-9,
        bytes_s: way.bytes_s.max(1) as f64,
    };
    let long = way(gpu.host_way);
    MachineSpeed {
        memory_bytes_s: (gpu.weight_bytes_s as f64).max(1.0),
        prompt_flops: (gpu.prompt_flops as f64).max(1.0),
        decode_flops: (gpu.decode_flops as f64).max(1.0),
        attention_flops: None,
        fixed_s: STEP_S + gpu.submit_ns as f64 * 1e-9,
        layer_s: kernels * gpu.kernel_ns as f64 * 1e-9,
        exchange: Some(Exchange {
            short: gpu.queue_way.map_or(long, way),
            long,
            relayed: gpu.relay_way.map(way),
            pieces: gpu.pieces_way.map(way),
        }),
    }
}

/// Whether the links of all nodes that answer are measured closely, from one side at least.
pub fn all_links(status: &Status) -> bool {
    let up: Vec<&MemberStatus> = status.members.iter().filter(|member| member.up).collect();
    let known = |one: &MemberStatus, other: &MemberStatus| {
        let is = |from: &str, to: &str| {
            status
                .links
                .iter()
                .any(|link| link.from == from && link.to == to && link.several_bytes_s.is_some())
        };
        is(&one.short, &other.short) || is(&other.short, &one.short)
    };
    up.iter().enumerate().all(|(place, one)| up[place + 1..].iter().all(|other| known(one, other)))
}

/// The link between two nodes, as two ranks have measured it. If they have not: the worse of both
/// directions of a TLS connection, half of whose round trip counts.
pub fn link(status: &Status, one: &MemberStatus, other: &MemberStatus) -> LinkSpeed {
    let of_pair = |link: &&LinkStatus| {
        (link.from == one.short && link.to == other.short)
            || (link.from == other.short && link.to == one.short)
    };
    if let Some(ranks) = status.links.iter().filter(of_pair).find_map(|link| link.ranks.as_ref()) {
        let latency_s = ranks.latency_ns as f64 * 1e-9;
        return LinkSpeed { latency_s, bytes_s: ranks.bytes_s.max(1) as f64 };
    }
    status.links.iter().filter(of_pair).fold(LinkSpeed::NONE, |worse, link| LinkSpeed {
        latency_s: worse.latency_s.max(link.latency_us as f64 / 2.0 * 1e-6),
        bytes_s: worse.bytes_s.min(link.bytes_s.max(1) as f64),
    })
}

#[cfg(test)]
#[path = "speeds_tests.rs"]
mod tests;
