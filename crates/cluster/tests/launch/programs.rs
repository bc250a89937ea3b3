//! The launcher and the ranks' programs, which are this test binary with other arguments.

use std::io::{Read, Write};

use thunder_cluster::launch::Launch;
use thunder_collectives::{Config, Group, Op};
use thunder_testing::Random;

/// Lines that a rank prints in `flow::integrity`.
pub const LINES: usize = 50_000;

/// Runs the launch that `json` describes, as `thunder launch` would.
pub fn launcher(json: &str) -> ! {
    let launch: Launch = serde_json::from_str(json).unwrap();
    match launch.plan().and_then(|plan| plan.run()) {
        Ok(outcome) => {
            if !outcome.summary().is_empty() {
                eprintln!("thunder launch: {}", outcome.summary());
            }
            std::process::exit(outcome.status.into())
        }
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(100)
        }
    }
}

/// One of the programs that ranks run.
pub fn rank(program: &str) -> ! {
    match program {
        "lines" => lines(),
        "reduce" => reduce(),
        "echo" => echo(),
        "hang" => loop {
            std::thread::sleep(std::time::Duration::from_secs(600));
        },
        _ => panic!("no program {program}"),
    }
    std::process::exit(0)
}

/// Line `number` of `flow::integrity`.
pub fn line(number: usize) -> String {
    const TEXT: &str = "añ€😀漢";
    let shift: String = TEXT.chars().cycle().skip(number % 5).take(number % 23).collect();
    format!("line {number} {shift}|")
}

/// Prints many lines in writes that end anywhere, even within characters.
fn lines() {
    let text: String = (0..LINES).map(|number| line(number) + "\n").collect();
    let (mut rest, mut random) = (text.as_bytes(), Random::new(u64::from(std::process::id())));
    let mut output = std::io::stdout().lock();
    while !rest.is_empty() {
        let count = (1 + random.below(20_000) as usize).min(rest.len());
        // Bypasses the buffer of `Stdout`, which would cut at lines.
        rustix::io::write(&output, &rest[..count]).map(|written| rest = &rest[written..]).unwrap();
    }
    output.flush().unwrap();
}

/// Prints the length of standard input and its checksum.
fn echo() {
    let mut data = Vec::new();
    std::io::stdin().read_to_end(&mut data).unwrap();
    let sum = data.iter().fold(0u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
    println!("{} {sum}", data.len());
}

/// Joins the environment's group and runs an all-reduce.
fn reduce() {
    let config = Config::from_env().unwrap().expect("no group in the environment");
    let mut group = Group::init(config).unwrap();
    let mut data = [1.0 + group.rank() as f32; 5];
    group.all_reduce(&mut data, Op::Sum).unwrap();
    let expected = (group.size() * (group.size() + 1) / 2) as f32;
    assert_eq!(data, [expected; 5]);
    println!("rank {} of {}: {}", group.rank(), group.size(), data[0]);
}
