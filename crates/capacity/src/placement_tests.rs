//! Layouts of a model of 1.5 billion weights on made-up machines.

use thunder_cost::Exchange;
use thunder_engine::assembly::memory::DeviceMemory;

use super::*;
use crate::layouts::published;

const GB: f64 = 1e9;
const FAST: LinkSpeed = LinkSpeed { latency_s: 15e-6, bytes_s: 5e9 };
const SLOW: LinkSpeed = LinkSpeed { latency_s: 2e-3, bytes_s: 0.1e9 };

fn machines(list: &[(f64, u64)], link: LinkSpeed) -> Machines {
    let node = |(place, (bandwidth, memory)): (usize, &(f64, u64))| Node {
        name: ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen"][place].to_owned(),
        speed: MachineSpeed {
            memory_bytes_s: bandwidth * GB,
            prompt_flops: bandwidth * 40.0 * GB,
            decode_flops: bandwidth * 20.0 * GB,
            attention_flops: None,
            fixed_s: 100e-6,
            layer_s: 0.0,
            exchange: None,
        },
        shared: None,
        memory_bytes: *memory,
        device_memory: DeviceMemory::default(),
        device: "cpu".to_owned(),
        step_rows: 256,
    };
    Machines {
        nodes: list.iter().enumerate().map(node).collect(),
        links: vec![vec![link; list.len()]; list.len()],
    }
}

const WANTED: Wanted = Wanted { goal: Goal::Latency, context: None, max_batch: 16, replicas: None };

fn plan(machines: &Machines, wanted: Wanted) -> (Vec<Layout>, Option<Pick>) {
    let (folder, _outline) = published("llama-1b", 4).expect("a known shape");
    let layouts = layouts(&folder, machines, &wanted).expect("an intact model");
    let pick = pick(&layouts, wanted.goal);
    (layouts, pick)
}

fn picked(machines: &Machines, wanted: Wanted) -> (String, Option<String>) {
    let (layouts, pick) = plan(machines, wanted);
    let pick = pick.expect("it fits");
    (layouts[pick.index].name.clone(), pick.slower)
}

#[test]
fn a_fast_link_adds_machines_and_a_slow_one_leaves_them_out() {
    let two = [(20.0, 8 << 30); 2];
    assert_eq!(picked(&machines(&two, FAST), WANTED), ("tensor on ant + bee".to_owned(), None));
    assert_eq!(picked(&machines(&two, SLOW), WANTED), ("ant alone".to_owned(), None));
    // 16 parallel answers: each machine has its own copy of the model.
    let throughput = Wanted { goal: Goal::Throughput, ..WANTED };
    assert_eq!(picked(&machines(&two, SLOW), throughput).0, "2 replicas: ant alone | bee alone");
}

#[test]
fn the_figures_are_bytes_over_bandwidth_and_reductions_over_the_link() {
    let (layouts, _) = plan(&machines(&[(20.0, 8 << 30); 2], FAST), WANTED);
    let of = |name: &str| layouts.iter().find(|layout| layout.name == name).expect(name);
    let (one, two, pipeline) = (of("ant alone"), of("tensor on ant + bee"), of("pipeline on ant + bee"));
    let (folder, _outline) = published("llama-1b", 4).expect("a known shape");
    let step = folder.weights.bytes() as f64 / (20.0 * GB) + 100e-6;
    // The cache of 1000 tokens adds a little.
    let one_s = 1.0 / one.decode_tokens_s;
    assert!((step..step * 1.1).contains(&one_s), "{one_s} for {step}");
    let reductions = 2.0 * folder.spec.layers.len() as f64 + 2.0;
    let two_s =
        (one_s - 100e-6) / 2.0 + 100e-6 + reductions * (15e-6 + folder.spec.hidden as f64 * 4.0 / 5e9);
    assert!(
        (1.0 / two.decode_tokens_s / two_s - 1.0).abs() < 0.02,
        "{} for {two_s}",
        1.0 / two.decode_tokens_s
    );
    // A pipeline does not make a single answer faster, but its stages read pieces of a prompt in
    // parallel.
    assert!(pipeline.decode_tokens_s < one.decode_tokens_s * 1.01, "{pipeline:?}");
    assert!(pipeline.prefill_tokens_s > one.prefill_tokens_s * 1.4, "{pipeline:?}");
    assert!(two.kv_tokens > one.kv_tokens, "{two:?}");
}

#[test]
fn a_pick_that_is_slower_than_one_machine_says_so() {
    let roomy = machines(&[(20.0, 3 << 30); 2], SLOW);
    let context = Wanted { goal: Goal::Context, ..WANTED };
    let (name, slower) = picked(&roomy, context);
    assert!(name.ends_with("ant + bee") || name.ends_with("bee + ant"), "{name}");
    assert!(slower.is_some_and(|slower| slower.contains("slower than with")), "{name}");
    // The model fits on neither machine alone, so no layout can be slower than one machine.
    let (layouts, pick) = plan(&machines(&[(20.0, 600 << 20); 2], SLOW), WANTED);
    let pick = pick.expect("it fits on both");
    assert_eq!((layouts[pick.index].machines(), pick.slower), (2, None));
    assert!(layouts.iter().any(|layout| !layout.fits() && layout.name == "ant alone"), "{layouts:?}");
    let (_, none) = plan(&machines(&[(20.0, 100 << 20); 2], SLOW), WANTED);
    assert_eq!(none, None);
}

#[test]
fn what_a_device_keeps_for_itself_is_not_left_to_the_cache() {
    let (folder, _outline) = published("qwen3-next-80b-a3b", 4).expect("a known shape");
    let tokens = |device_memory: DeviceMemory| {
        let mut machines = machines(&[(100.0, 60 << 30)], FAST);
        machines.nodes[0].device_memory = device_memory;
        layouts(&folder, &machines, &WANTED).expect("an intact model")[0].kv_tokens
    };
    let none = DeviceMemory::default();
    let all = tokens(none);
    assert!(tokens(DeviceMemory { other_states: 4, ..none }) < all);
    assert!(tokens(DeviceMemory { expert_bytes: 384 << 20, ..none }) < all);
    assert!(tokens(DeviceMemory { largest_buffer: Some(16 << 20), ..none }) < all);
}

#[test]
fn shares_follow_speed_until_memory_ends() {
    let (folder, _outline) = published("llama-1b", 4).expect("a known shape");
    let of = |list: &[(f64, u64)]| {
        let machines = machines(list, FAST);
        let nodes: Vec<usize> = (0..list.len()).collect();
        weights(&folder, &machines, &nodes, &nodes)
    };
    assert_eq!(of(&[(30.0, 8 << 30), (10.0, 8 << 30)]), [100, 33]);
    // Machines of nearly the same speed get the same shares.
    assert_eq!(of(&[(21.0, 8 << 30), (20.0, 8 << 30)]), [1, 1]);
    // The fast machine has memory for a fifth.
    let fifth = (folder.weights.bytes() as f64 / 4.0) as u64;
    let shares = of(&[(30.0, fifth), (10.0, 8 << 30), (10.0, 8 << 30)]);
    let share = f64::from(shares[0]) / f64::from(shares.iter().sum::<u32>());
    assert!((0.19..0.21).contains(&share), "{shares:?}");
    assert_eq!(shares[1], shares[2]);
}

#[test]
fn many_machines_are_planned_quickly() {
    let eight: Vec<(f64, u64)> = (0..8).map(|place| (20.0 + f64::from(place), 8 << 30)).collect();
    let began = std::time::Instant::now();
    let (layouts, pick) = plan(&machines(&eight, FAST), WANTED);
    assert!(layouts.len() < 80 && pick.is_some(), "{}", layouts.len());
    assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
    let asked = Wanted { replicas: Some(3), ..WANTED };
    let (layouts, _) = plan(&machines(&eight, FAST), asked);
    assert!(layouts.iter().all(|layout| layout.groups.len() == 3) && layouts.len() == 1, "{layouts:?}");
    let mut used: Vec<usize> = layouts[0].groups.iter().flat_map(|group| group.nodes.clone()).collect();
    used.sort_unstable();
    let all = used.len();
    used.dedup();
    assert_eq!(used.len(), all, "no machine is in two replicas");
}

#[test]
fn nodes_of_one_machine_share_its_memory_when_they_compute_at_once() {
    let mut shared = machines(&[(20.0, 8 << 30); 2], FAST);
    for node in &mut shared.nodes {
        let together = MachineSpeed { memory_bytes_s: 11.0 * GB, ..node.speed };
        node.shared = Some(Shared { machine: 7, memories: 1, together });
    }
    let (apart, _) = plan(&machines(&[(20.0, 8 << 30); 2], FAST), WANTED);
    let (shared, _) = plan(&shared, WANTED);
    let figures = |layouts: &[Layout], name: &str| {
        let layout = layouts.iter().find(|layout| layout.name == name).expect(name);
        (layout.decode_tokens_s, layout.batch_tokens_s, layout.kv_tokens)
    };
    let of = |name: &str| (figures(&apart, name), figures(&shared, name));
    // The single node has its machine alone, and the stages of one answer take turns.
    let (before, after) = of("ant alone");
    assert_eq!(before, after);
    let (before, after) = of("pipeline on ant + bee");
    assert_eq!(before.0, after.0);
    assert!(after.1 < before.1 * 0.99, "16 answers keep both stages busy: {after:?} {before:?}");
    let (before, after) = of("tensor on ant + bee");
    assert!((0.5..0.65).contains(&(after.0 / before.0)), "{after:?} {before:?}");
    assert!(after.2 < before.2, "the memory is the same memory: {after:?} {before:?}");
    let (before, after) = of("2 replicas: ant alone | bee alone");
    assert_eq!(before.0, after.0, "a single answer");
    assert!(after.1 < before.1 * 0.99, "{after:?} {before:?}");
}

#[test]
fn a_pick_of_one_machine_says_what_more_would_give() {
    let far = LinkSpeed { latency_s: 20e-3, ..SLOW };
    let (layouts, pick) = plan(&machines(&[(20.0, 8 << 30); 2], far), WANTED);
    let pick = pick.expect("it fits");
    let mut several = layouts.iter().filter(|layout| layout.machines() > 1 && layout.groups.len() == 1);
    let next = several.next().expect("both");
    let words = format!("more machines gain nothing: {} would give {:.2} s", next.name, next.answer_s);
    assert!(pick.why.contains(&words), "{} {words}", pick.why);
}

#[test]
fn nodes_that_take_gpus_of_a_machine_in_turn_share_those_that_are_too_few() {
    let mut four = machines(&[(20.0, 8 << 30); 4], FAST);
    for node in &mut four.nodes {
        node.shared = Some(Shared { machine: 7, memories: 2, together: node.speed });
    }
    let memory = |nodes: &[usize]| four.memory_among(0, nodes);
    assert_eq!([memory(&[0]), memory(&[0, 1]), memory(&[0, 1, 2])], [8 << 30, 8 << 30, 4 << 30]);
}

#[test]
fn hosts_relay_sums_between_ranks_with_a_gpu_each_on_one_machine() {
    let mut four = machines(&[(20.0, 8 << 30); 4], FAST);
    for (place, node) in four.nodes.iter_mut().enumerate() {
        node.speed.exchange =
            Some(Exchange { short: FAST, long: FAST, relayed: Some(FAST), pieces: Some(FAST) });
        node.shared = Some(Shared { machine: place / 3, memories: 2, together: node.speed });
    }
    let relays = |nodes: &[usize]| {
        let speeds = four.speeds_in_stage(nodes, &vec![1.0; nodes.len()]);
        let relays = |speed: &MachineSpeed| {
            let Exchange { relayed, pieces, .. } = speed.exchange.unwrap();
            assert_eq!(relayed, pieces);
            relayed.is_some()
        };
        speeds.iter().map(relays).collect::<Vec<_>>()
    };
    assert_eq!(relays(&[0, 1]), [true; 2]);
    assert_eq!(relays(&[0, 1, 2]), [false; 3], "two share a GPU");
    assert_eq!(relays(&[2, 3]), [false; 2], "on two machines");
}

#[test]
fn two_pairs_with_a_slow_cable_between_them_are_two_stages() {
    let mut pairs = machines(&[(20.0, 8 << 30); 4], SLOW);
    // ant and cat have a fast link, and bee and dog.
    for (one, other) in [(0, 2), (1, 3)] {
        (pairs.links[one][other], pairs.links[other][one]) = (FAST, FAST);
    }
    let (layouts, _) = plan(&pairs, Wanted { replicas: Some(1), ..WANTED });
    let of = |name: &str| layouts.iter().find(|layout| layout.name == name).expect(name);
    let both = of("2 stages of 2 on ant + cat + bee + dog");
    assert_eq!((both.groups[0].stages, &both.groups[0].nodes[..]), (2, &[0, 2, 1, 3][..]));
    let others = ["tensor on ant + bee + cat + dog", "pipeline on ant + bee + cat + dog"];
    for other in others.map(of) {
        assert!(both.decode_tokens_s > other.decode_tokens_s, "{both:?} {other:?}");
    }
}

#[test]
fn given_shares_are_planned_as_given() {
    let two = machines(&[(20.0, 8 << 30); 2], FAST);
    let (folder, _outline) = published("llama-1b", 4).expect("a known shape");
    let given = with_shares(&folder, &two, &WANTED, &[1, 0], &[3, 1]).expect("an intact model");
    let names: Vec<&str> = given.iter().map(|layout| layout.name.as_str()).collect();
    assert_eq!(names, ["tensor on bee 75 % + ant 25 %", "pipeline on bee 75 % + ant 25 %"]);
    let (even, _) = plan(&two, WANTED);
    let even = even.iter().find(|layout| layout.name == "tensor on ant + bee").expect("both");
    // The rank with three quarters takes as long as it does alone with them.
    assert!((0.6..0.8).contains(&(given[0].decode_tokens_s / even.decode_tokens_s)), "{given:?}");
}
