//! Predictions from an H100's measured figures, against what models gave on it.

use thunder_capacity::placement::{self, Goal, Layout, Machines, Pick, Wanted};
use thunder_model::synth::{Shape, outline};

use super::*;

/// An NVIDIA H100 80GB HBM3, driver 580.159.04, 25 November 2026. From
/// bench/results/gpu/h100-2026-11-25.json: memory, bandwidth, products of 16 and 512 rows, half
/// of a product with a norm, exchanges of 8 and 64 KiB. From docs/lab/2026-11-25-gpu-ahead.md:
/// 32 µs for the 66.1 MB of a gate, 9.3 µs for 9.4 MB. From the prototype on an H200 (issue 20): a
/// submission and a wait take 57 to 88 µs. Copies of long sums were not measured: 12 GB/s is
/// assumed, half of what PCIe 5 gives.
fn h100() -> GpuReport {
    GpuReport {
        number: 0,
        name: "NVIDIA H100 80GB HBM3".to_owned(),
        count: 1,
        has_own_memory: true,
        memory_bytes: 85_520_809_984,
        step_rows: 2048,
        memory_bytes_s: 3_071_910_647_130,
        weight_bytes_s: 2_497_000_000_000,
        decode_flops: 15_371_412_281_476,
        prompt_flops: 151_974_056_150_329,
        kernel_ns: 5_572,
        submit_ns: 70_000,
        queue_way: Some(HostWayReport { latency_ns: 6_830, bytes_s: 4_507_000_000 }),
        host_way: HostWayReport { latency_ns: 70_000, bytes_s: 12_000_000_000 },
        relay_way: None,
        pieces_way: None,
        largest_buffer: 2 << 30,
        other_states: 4,
        expert_bytes: 384 << 20,
    }
}

/// Shared memory of that host: what sums of two ranks took more than exchanges with a host that
/// sums nothing (docs/lab/2026-11-25-gpu-prompts.md: 15.8 µs for 8 KiB, 41.3 for 64).
const LINK: LinkSpeed = LinkSpeed { latency_s: 5.3e-6, bytes_s: 4.5e9 };

/// Plans a model for `nodes` nodes with an H100 each; bf16 has no `bits`.
fn planned(shape: &str, bits: Option<u32>, nodes: usize) -> (Vec<Layout>, Pick) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model");
    outline(&Shape::named(shape).expect("a known shape"), bits, 64, &path).expect("an outline");
    let folder = ModelFolder::open(&path).expect("an intact model");
    let gpu = h100();
    let node = |name: &str| Node {
        name: name.to_owned(),
        speed: of_gpu(&gpu, &folder),
        shared: None,
        memory_bytes: gpu.memory_bytes,
        device_memory: of_memory(&gpu),
        device: gpu.to_string(),
        step_rows: gpu.step_rows as usize,
    };
    let machines = Machines {
        nodes: ["ant", "bee"][..nodes].iter().map(|name| node(name)).collect(),
        links: vec![vec![LINK; nodes]; nodes],
    };
    let wanted = Wanted { goal: Goal::Latency, context: None, max_batch: 16, replicas: Some(1) };
    let layouts = placement::layouts(&folder, &machines, &wanted).expect("an intact model");
    let pick = placement::pick(&layouts, wanted.goal).expect("it fits");
    (layouts, pick)
}

fn assert_near(what: &str, predicted: f64, measured: f64) {
    let error = predicted / measured - 1.0;
    println!("{what}: {predicted:.1} predicted, {measured:.1} measured, {:+.0} %", error * 100.0);
    assert!(error.abs() < 0.2, "{what}: {predicted} predicted, {measured} measured");
}

#[test]
fn an_h100_is_predicted_within_a_fifth() {
    // Tokens a second of one request after 480 tokens, and of a prompt of 2,048: docs/gpu.md.
    let measured = [
        ("llama-1b", 4, 1135.0),
        ("qwen3-4b", 4, 416.5),
        ("llama-8b", 4, 354.0),
        ("qwen3-32b", 4, 95.0),
        ("qwen3-32b", 8, 60.1),
        ("qwen3-30b-a3b", 4, 224.0),
        ("llama-70b", 4, 53.4),
    ];
    for (shape, bits, measured) in measured {
        let (layouts, _) = planned(shape, Some(bits), 1);
        assert_near(&format!("{shape}, {bits} bits"), layouts[0].decode_tokens_s, measured);
    }
    assert_near("llama-8b, a prompt", planned("llama-8b", Some(4), 1).0[0].prefill_tokens_s, 11_000.0);
}

#[test]
fn two_h100_are_predicted_and_taken_only_where_they_are_needed() {
    let of = |layouts: &[Layout], name: &str| {
        let layout = layouts.iter().find(|layout| layout.name == name);
        layout.unwrap_or_else(|| panic!("{name}: {layouts:?}")).clone()
    };
    // Two GPUs of one host, whose sums go by shared memory.
    let (layouts, pick) = planned("llama-70b", Some(4), 2);
    let (one, two) = (of(&layouts, "ant alone"), of(&layouts, "tensor on ant + bee"));
    assert_near("llama-70b on two", two.decode_tokens_s, 59.0);
    // Decode gains a fifth (a tenth was measured); prompts lose more by sums that the host adds.
    assert!(two.decode_tokens_s > one.decode_tokens_s * 1.1, "{two:?} {one:?}");
    assert!(two.answer_s > one.answer_s && layouts[pick.index].name == "ant alone", "{}", pick.why);

    let (layouts, pick) = planned("llama-8b", Some(4), 2);
    let (one, two) = (of(&layouts, "ant alone"), of(&layouts, "tensor on ant + bee"));
    assert!(two.decode_tokens_s < one.decode_tokens_s, "{two:?} {one:?}");
    assert_eq!(layouts[pick.index].name, "ant alone");
    assert!(pick.why.contains("more machines gain nothing"), "{}", pick.why);

    // 141 GB of bf16 fit on neither.
    let (layouts, pick) = planned("llama-70b", None, 2);
    assert_eq!(
        (layouts[pick.index].machines(), of(&layouts, "ant alone").fits()),
        (2, false),
        "{}",
        pick.why
    );
}

#[test]
fn agents_of_one_machine_take_turns_on_its_gpus() {
    let speed = MachineSpeed {
        memory_bytes_s: 6.0,
        prompt_flops: 6.0,
        decode_flops: 6.0,
        attention_flops: None,
        fixed_s: 1.0,
        layer_s: 1.0,
        exchange: None,
    };
    assert_eq!(in_turn(&speed, 2, 2), speed);
    let three = in_turn(&speed, 2, 3);
    assert_eq!(
        (three.memory_bytes_s, three.prompt_flops, three.layer_s, three.fixed_s),
        (3.0, 3.0, 2.0, 1.0)
    );
}

#[test]
fn a_gpu_of_an_older_version_keeps_nothing_that_is_known() {
    let mut report = serde_json::to_value(h100()).expect("a report");
    let fields = report.as_object_mut().expect("an object");
    for figure in ["largest_buffer", "other_states", "expert_bytes"] {
        assert!(fields.remove(figure).is_some(), "{figure}");
    }
    let older: GpuReport = serde_json::from_value(report).expect("a report of an older version");
    assert_eq!(of_memory(&older), DeviceMemory::default());
    assert_eq!(of_memory(&h100()).largest_buffer, Some(2 << 30));
}

#[test]
fn a_device_that_a_node_lacks_is_named() {
    let report = |gpu| SpeedReport { gpu, ..SpeedReport::default() };
    let (with, without) = (report(Some(h100())), report(None));
    let is_gpu = |report, choice| gpu_of(report, choice).map(|gpu| gpu.is_some());
    assert_eq!(is_gpu(&with, DeviceChoice::Auto), Ok(true));
    assert_eq!(is_gpu(&without, DeviceChoice::Auto), Ok(false));
    assert_eq!(is_gpu(&with, DeviceChoice::Cpu), Ok(false));
    assert_eq!(is_gpu(&with, DeviceChoice::Numbered(0)), Ok(true));
    assert_eq!(is_gpu(&without, DeviceChoice::Gpu), Err("has no GPU".to_owned()));
    assert!(is_gpu(&with, DeviceChoice::Numbered(2)).is_err_and(|why| why.contains("THUNDER_DEVICE=gpu:2")));
}
