//! A machine's power while it serves: measured where possible, otherwise estimated if the operator
//! gives its idle and busy watts.
//!
//! - The processor: RAPL's counters (Linux, root), or `powermetrics` (macOS, root).
//! - NVIDIA's graphics cards: `nvidia-smi`, which asks NVML; any user may.
//! - Estimate: watts between idle and busy, by the share of time that processors are busy. It
//!   stands for the whole machine, so graphics cards are not added to it.

use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::Meter;

/// Interval of measurements. RAPL's counters wrap after a minute or more.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// A program that takes longer to report watts is not started again.
const TELL_LIMIT: Duration = Duration::from_secs(4);

/// A machine's watts, given by the operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Watts {
    /// When nothing runs.
    pub idle: f64,
    /// When all processors are busy.
    pub busy: f64,
}

/// Energy since a watch began.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Energy {
    /// Joules; `None` if nothing is known.
    pub joules: Option<f64>,
    /// Watts between the last two measurements.
    pub watts: Option<f64>,
    /// Seconds for which the joules were counted.
    pub seconds: f64,
    /// Whether a part of the joules is an estimate.
    pub estimated: bool,
    /// The parts that are counted, in words.
    pub sources: Vec<String>,
    /// The parts that are not counted, and what to do about it.
    pub missing: Vec<String>,
}

/// Watches this machine's power. Cheap to clone; it ends with its last clone.
#[derive(Debug, Clone)]
pub struct PowerWatch(Arc<Mutex<State>>);

/// A program that reports watts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Teller {
    NvidiaSmi,
    Powermetrics,
}

#[derive(Debug)]
struct State {
    began: Instant,
    looked: Instant,
    rapl: Option<Meter>,
    tellers: Vec<Teller>,
    estimate: Option<Watts>,
    /// Busy and total ticks of the processors at the last measurement.
    ticks: Option<(u64, u64)>,
    rapl_joules: f64,
    joules: f64,
    watts: Option<f64>,
}

impl PowerWatch {
    /// Begins to watch. `watts` is for machines without a readable counter.
    pub fn start(watts: Option<Watts>) -> Self {
        let rapl = Meter::open();
        let mut tellers = vec![Teller::NvidiaSmi, Teller::Powermetrics];
        tellers.retain(|teller| teller.watts().is_some());
        let knows_processor = rapl.is_some() || tellers.contains(&Teller::Powermetrics);
        let estimate = watts.filter(|_| !knows_processor);
        if estimate.is_some() {
            tellers.clear();
        }
        let now = Instant::now();
        let state = State {
            began: now,
            looked: now,
            rapl,
            tellers,
            estimate,
            ticks: ticks(&fs::read_to_string("/proc/stat").unwrap_or_default()),
            rapl_joules: 0.0,
            joules: 0.0,
            watts: None,
        };
        let state = Arc::new(Mutex::new(state));
        let weak = Arc::downgrade(&state);
        // Without the thread, joules are only counted when they are requested, and counters may
        // wrap.
        let _ = std::thread::Builder::new().name("power".into()).spawn(move || run(&weak));
        Self(state)
    }

    /// Energy since the start.
    pub fn energy(&self) -> Energy {
        let mut state = lock(&self.0);
        // Two requests at almost the same time share one measurement.
        if state.looked.elapsed() >= Duration::from_secs(1) {
            state.look(Instant::now());
        }
        state.energy()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run(weak: &Weak<Mutex<State>>) {
    loop {
        std::thread::sleep(LOOK_EVERY);
        let Some(state) = weak.upgrade() else { return };
        lock(&state).look(Instant::now());
    }
}

impl State {
    fn look(&mut self, now: Instant) {
        let seconds = now.duration_since(self.looked).as_secs_f64();
        let mut joules = 0.0;
        if let Some(rapl) = &mut self.rapl {
            let all = rapl.joules();
            joules += all - std::mem::replace(&mut self.rapl_joules, all);
        }
        self.tellers.retain(|teller| match teller.watts() {
            Some(watts) => {
                joules += watts * seconds;
                true
            }
            None => false,
        });
        let ticks = ticks(&fs::read_to_string("/proc/stat").unwrap_or_default());
        if let Some(watts) = self.estimate {
            joules += watts.at(busy_share(self.ticks, ticks)) * seconds;
        }
        self.ticks = ticks;
        self.looked = now;
        self.joules += joules;
        self.watts = (self.knows_some() && seconds > 0.0).then(|| joules / seconds);
    }

    fn knows_some(&self) -> bool {
        self.rapl.is_some() || !self.tellers.is_empty() || self.estimate.is_some()
    }

    fn energy(&self) -> Energy {
        let (mut sources, mut missing) = (Vec::new(), Vec::new());
        if self.rapl.is_some() {
            sources.push("processors and their memory (RAPL)".to_owned());
        }
        sources.extend(self.tellers.iter().map(|teller| teller.counts().to_owned()));
        if let Some(Watts { idle, busy }) = self.estimate {
            sources.push(format!(
                "an estimate: {idle} W idle to {busy} W busy, by the share of time that processors are busy"
            ));
        } else if self.rapl.is_none() && !self.tellers.contains(&Teller::Powermetrics) {
            missing.push(
                "processors: no counter that this user may read (RAPL and powermetrics are for root); \
                 --watts IDLE,BUSY estimates"
                    .to_owned(),
            );
        }
        if self.estimate.is_none() {
            missing.push("power supplies, disks and fans: a wall meter shows 10 to 30 % more".to_owned());
        }
        Energy {
            joules: self.knows_some().then_some(self.joules),
            watts: self.watts,
            seconds: self.looked.duration_since(self.began).as_secs_f64(),
            estimated: self.estimate.is_some(),
            sources,
            missing,
        }
    }
}

impl Watts {
    /// Watts at a share of busy time, 0 to 1.
    fn at(self, share: f64) -> f64 {
        self.idle + (self.busy - self.idle) * share
    }
}

impl std::str::FromStr for Watts {
    type Err = String;

    /// Reads `IDLE,BUSY`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\": write watts idle and busy, like 40,180");
        let (idle, busy) = text.split_once(',').ok_or_else(wrong)?;
        let parse = |text: &str| text.trim().parse::<f64>().ok().filter(|watts| (0.0..=1e5).contains(watts));
        let (idle, busy) = parse(idle).zip(parse(busy)).ok_or_else(wrong)?;
        if busy < idle {
            Err(format!("\"{text}\": a busy machine draws no less than an idle one"))
        } else {
            Ok(Self { idle, busy })
        }
    }
}

impl Teller {
    fn counts(self) -> &'static str {
        match self {
            Self::NvidiaSmi => "NVIDIA's graphics cards (NVML by nvidia-smi)",
            Self::Powermetrics => "processors and graphics of Apple's chip (powermetrics)",
        }
    }

    /// Its present watts; `None` if the program is missing or reports none.
    fn watts(self) -> Option<f64> {
        match self {
            Self::NvidiaSmi => of_nvidia_smi(&tell(
                "nvidia-smi",
                &["--query-gpu=power.draw", "--format=csv,noheader,nounits"],
            )?),
            Self::Powermetrics => of_powermetrics(&tell(
                "powermetrics",
                &["-n", "1", "-i", "500", "--samplers", "cpu_power,gpu_power"],
            )?),
        }
    }
}

/// Watts of all cards, one line for each.
fn of_nvidia_smi(text: &str) -> Option<f64> {
    let watts: Vec<f64> = text.lines().filter_map(|line| line.trim().parse().ok()).collect();
    (!watts.is_empty()).then(|| watts.iter().sum())
}

/// Watts in the line `Combined Power (CPU + GPU + ANE): 1234 mW`.
fn of_powermetrics(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with("Combined Power"))?;
    let (_, value) = line.split_once("): ")?;
    value.strip_suffix(" mW")?.parse::<f64>().ok().map(|milliwatts| milliwatts / 1e3)
}

/// The output of a program, if it succeeds in time.
fn tell(program: &str, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let began = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if began.elapsed() < TELL_LIMIT => std::thread::sleep(Duration::from_millis(10)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    };
    let mut text = String::new();
    child.stdout?.take(64 << 10).read_to_string(&mut text).ok()?;
    status.success().then_some(text)
}

/// Busy and total ticks of all processors since the system started (Linux).
fn ticks(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = line.split_whitespace().filter_map(|tick| tick.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
    let ticks = ticks.get(..8)?;
    let all = ticks.iter().sum::<u64>();
    Some((all - ticks[3] - ticks[4], all))
}

/// The busy share between two measurements; 1 if the system does not report it.
fn busy_share(before: Option<(u64, u64)>, now: Option<(u64, u64)>) -> f64 {
    let Some(((busy, all), (busy_now, all_now))) = before.zip(now) else { return 1.0 };
    let all = all_now.saturating_sub(all);
    if all == 0 { 0.0 } else { (busy_now.saturating_sub(busy) as f64 / all as f64).min(1.0) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn programs_that_tell_watts_are_read() {
        assert_eq!(of_nvidia_smi("71.46\n 68.54\n"), Some(140.0));
        assert_eq!(of_nvidia_smi("[N/A]\n"), None);
        let text = "*** Sampled system activity\nCPU Power: 900 mW\nGPU Power: 334 mW\nCombined Power (CPU + GPU + ANE): 1234 mW\n";
        assert_eq!(of_powermetrics(text), Some(1.234));
        assert_eq!(of_powermetrics("Combined Power: ?"), None);
        assert_eq!(tell("/nonexistent/program", &[]), None);
        assert_eq!(tell("false", &[]), None);
    }

    #[test]
    fn an_estimate_follows_the_busy_share() {
        let stat = |user: u64, idle: u64| ticks(&format!("cpu  {user} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1\n"));
        assert_eq!(stat(30, 70), Some((30, 100)));
        let share = busy_share(stat(30, 70), stat(80, 120));
        assert_eq!(
            (share, busy_share(stat(1, 1), stat(1, 1)), busy_share(None, stat(1, 1))),
            (0.5, 0.0, 1.0)
        );
        let watts: Watts = "40,180".parse().unwrap();
        assert_eq!(watts.at(share), 110.0);
        for bad in ["40", "a,b", "180,40", "-1,5", "1,inf"] {
            assert!(bad.parse::<Watts>().is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_not_counted_is_said() {
        let began = Instant::now();
        let mut state = State {
            began,
            looked: began,
            rapl: None,
            tellers: Vec::new(),
            estimate: None,
            ticks: None,
            rapl_joules: 0.0,
            joules: 0.0,
            watts: None,
        };
        let later = began + Duration::from_secs(10);
        state.look(later);
        let nothing = state.energy();
        assert_eq!((nothing.joules, nothing.watts, nothing.estimated), (None, None, false));
        assert!(nothing.missing[0].contains("--watts"), "{nothing:?}");
        (state.estimate, state.looked) = (Some(Watts { idle: 50.0, busy: 50.0 }), began);
        state.look(later);
        let estimated = state.energy();
        assert_eq!((estimated.joules, estimated.watts, estimated.estimated), (Some(500.0), Some(50.0), true));
        assert!(estimated.sources[0].contains("estimate"), "{estimated:?}");
    }
}
