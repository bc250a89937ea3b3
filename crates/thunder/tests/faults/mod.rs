//! Random faults in a cluster of three, while answers are in flight and the cluster changes.
//!
//! After each fault: the answer has ended with the text that it has without a fault, the cluster is
//! whole again, all nodes hold one document with all that was in it, and no rank is left over. In
//! the end the cluster's usage report has every answer once.

mod fetches;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thunder_testing::Random;

use crate::{
    NAMES, Node, PRELOAD, PROGRAM, Switch, can_make_machines, file, index_of, text_of, three_nodes, wait,
};

/// Time for an answer, the fault included.
const ANSWER_LIMIT: Duration = Duration::from_secs(90);

/// What happens to a node.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// The agent is killed.
    KillAgent,
    /// A rank is killed.
    KillRank,
    /// The machine loses its power.
    PowerCut,
    /// The agent is stopped for some seconds.
    StopAgent,
    /// A rank is stopped.
    StopRank,
    /// The network cable is out for some seconds.
    Cut,
    /// The disk is full for some seconds.
    DiskFull,
    /// The clock is wrong by days for some seconds.
    ClockJump,
    /// The disk takes 2 s for each write that must last.
    SlowDisk,
    /// The system gives a rank no more memory.
    OutOfMemory,
}

const FAULTS: [Fault; 10] = [
    Fault::KillAgent,
    Fault::KillRank,
    Fault::PowerCut,
    Fault::StopAgent,
    Fault::StopRank,
    Fault::Cut,
    Fault::DiskFull,
    Fault::ClockJump,
    Fault::SlowDisk,
    Fault::OutOfMemory,
];

/// Adds the seconds in a machine's /root/clock to what its programs read as the time: a namespace
/// for the time of day does not exist. While there is a file /root/slow, the disk is slow.
const PRELOADED: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
static void wait_for_the_disk(void) {
    for (int tenth = 0; tenth < 20 && access("/root/slow", F_OK) == 0; tenth++) usleep(100000);
}
int fsync(int file) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    wait_for_the_disk();
    return real(file);
}
int fdatasync(int file) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
    wait_for_the_disk();
    return real(file);
}
int clock_gettime(clockid_t id, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, time);
    FILE *file = id == CLOCK_REALTIME ? fopen("/root/clock", "r") : NULL;
    long seconds = 0;
    if (file && fscanf(file, "%ld", &seconds) == 1) time->tv_sec += seconds;
    if (file) fclose(file);
    return result;
}
"#;

/// Has all agents that start from now on see clock and disk through [`PRELOADED`].
fn prepare_clock_and_disk(folder: &Path) {
    let (source, library) = (folder.join("faults.c"), folder.join("faults.so"));
    std::fs::write(&source, PRELOADED).unwrap();
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).status();
    assert!(built.unwrap().success(), "cc builds what moves the clock and slows the disk");
    PRELOAD.set(library).unwrap();
}

/// What goes on when it happens.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Moment {
    /// A node fetches its part of another model.
    Fetch,
    /// The model is being loaded.
    Load,
    /// A prompt is read.
    Prefill,
    /// An answer is written.
    Decode,
    /// The victim is being drained.
    Drain,
    /// The victim has just joined again.
    Join,
}

const MOMENTS: [Moment; 6] =
    [Moment::Fetch, Moment::Load, Moment::Prefill, Moment::Decode, Moment::Drain, Moment::Join];

/// A request, and the answer without a fault.
struct Question {
    body: Value,
    answer: String,
}

/// Processes of a machine whose first argument is this: those in its network namespace.
fn processes(node: &Node, argument: &str) -> Vec<i32> {
    let namespace = |id: &str| std::fs::metadata(format!("/proc/{id}/ns/net")).map(|file| file.ino()).ok();
    let own = namespace(&node.machine.id());
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(id) = entry.file_name().to_str().filter(|id| id.parse::<i32>().is_ok()).map(str::to_owned)
        else {
            continue;
        };
        let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0);
        let is_program = words.next() == Some(PROGRAM.as_bytes());
        if is_program && words.next() == Some(argument.as_bytes()) && namespace(&id) == own {
            found.push(id.parse().unwrap());
        }
    }
    found
}

fn signal(id: i32, signal: i32) {
    // SAFETY: a process of this test's machines.
    unsafe { libc::kill(id, signal) };
}

/// Gives a process no more memory than it has, or as much as it wants.
fn limit_memory(id: i32, is_out: bool) {
    let pages = std::fs::read_to_string(format!("/proc/{id}/statm")).unwrap_or_default();
    let has = pages.split(' ').next().and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096;
    let limit = if is_out { has } else { libc::RLIM_INFINITY };
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a process of this test's machines; the limit is read before the call returns.
    unsafe { libc::prlimit(id, libc::RLIMIT_AS, &raw const limit, std::ptr::null_mut()) };
}

struct Series {
    switch: Switch,
    nodes: [Node; 3],
    random: Random,
    questions: [Question; 3],
    /// Answers so far.
    answers: u64,
    folder: tempfile::TempDir,
}

/// Gives all nodes' clients a key of the cluster, so that usage is recorded.
fn give_key(nodes: &[Node; 3]) {
    let made = nodes[0].machine.command(&[PROGRAM, "keys", "create", "faults"]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let secret = String::from_utf8(made.stdout).unwrap();
    let line = format!("echo 'header = \"authorization: Bearer {}\"' >/root/.curlrc", secret.trim());
    nodes.iter().for_each(|node| node.machine.run(&line).unwrap());
}

impl Series {
    fn new(seed: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        prepare_clock_and_disk(folder.path());
        let switch = Switch::new().unwrap();
        let addresses: [&[&str]; 3] = [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]];
        let nodes = three_nodes(&switch, "faults", addresses);
        give_key(&nodes);
        let loaded = nodes[0].model(&["load", "builtin", "--nodes", "2", "--wait", "120"]);
        assert!(loaded.status.success(), "{}", String::from_utf8_lossy(&loaded.stderr));
        let long = "Machines die, and answers go on. ".repeat(60);
        let question = |prompt: &str| {
            let body = json!({
                "model": "builtin", "prompt": prompt, "max_tokens": 500, "ignore_eos": true, "temperature": 0,
                "stream": true,
            });
            Question { body, answer: String::new() }
        };
        let questions = [question("The sea"), question(&long), fetches::prepare(&nodes)];
        let mut series = Self { switch, nodes, random: Random::new(seed), questions, answers: 0, folder };
        series.mend();
        for index in 0..2 {
            let (answer, _) = series.ask(0, index, |_| {});
            assert!(answer.len() > 500, "{answer}");
            series.questions[index].answer = answer;
        }
        series.learn_fetched();
        series
    }

    /// Asks a node, calls `meanwhile` at the moment of the fault, and returns the answer and the
    /// time that it took.
    fn ask(&mut self, node: usize, question: usize, meanwhile: impl FnOnce(&mut Self)) -> (String, Duration) {
        let to = self.folder.path().join("answer");
        let _ = std::fs::remove_file(&to);
        let began = Instant::now();
        let mut asking = self.nodes[node].stream("/v1/completions", &self.questions[question].body, &to);
        // The first question's fault comes within the answer, the second's within the prompt.
        let least = if question == 0 { 100 } else { 0 };
        let is_due = |to: &Path| text_of(&file(to)).len() >= least;
        wait("the answer begins", || is_due(&to) || asking.0.try_wait().unwrap().is_some());
        meanwhile(self);
        while asking.0.try_wait().unwrap().is_none() {
            assert!(began.elapsed() < ANSWER_LIMIT, "no answer: {}", file(&to));
            std::thread::sleep(Duration::from_millis(20));
        }
        let said = file(&to);
        assert!(said.contains("[DONE]"), "the answer is not complete: {said}");
        self.answers += 1;
        (text_of(&said), began.elapsed())
    }

    /// Makes a fault. Returns how to end it, if it does not end by itself.
    fn strike(&mut self, fault: Fault, victim: usize) {
        let name = NAMES[victim];
        let agent = self.nodes[victim].agent.as_ref().unwrap().0.id() as i32;
        match fault {
            Fault::KillAgent => signal(agent, libc::SIGKILL),
            Fault::PowerCut => {
                self.switch.set_cable(name, false).unwrap();
                signal(agent, libc::SIGKILL);
            }
            Fault::StopAgent => signal(agent, libc::SIGSTOP),
            Fault::KillRank => {
                processes(&self.nodes[victim], "serve").iter().for_each(|id| signal(*id, libc::SIGKILL))
            }
            Fault::StopRank => {
                processes(&self.nodes[victim], "serve").iter().for_each(|id| signal(*id, libc::SIGSTOP))
            }
            Fault::Cut => self.switch.set_cable(name, false).unwrap(),
            Fault::DiskFull => {
                // A file system cannot be made smaller than what it holds. What the agent frees and
                // takes meanwhile is its own.
                let fill = "used=$(df -k --output=used /root | tail -n 1) && \
                            mount -o remount,size=$((used + 64))k /root && \
                            ! dd if=/dev/zero of=/root/fill bs=4k 2>/dev/null";
                self.nodes[victim].machine.run(fill).unwrap();
            }
            Fault::SlowDisk => {
                self.nodes[victim].machine.run("touch /root/slow").unwrap();
                // A change that must last takes its time, and holds up nothing else.
                let began = Instant::now();
                assert!(self.nodes[victim].cluster(&["token"]).status.success());
                assert!(began.elapsed() >= Duration::from_secs(2), "the disk is not slow");
            }
            Fault::OutOfMemory => {
                processes(&self.nodes[victim], "serve").iter().for_each(|id| limit_memory(*id, true));
            }
            Fault::ClockJump => {
                let days = self.random.below(60) as i64 - 30;
                self.nodes[victim].machine.run(&format!("echo {} >/root/clock", days * 86_400)).unwrap();
            }
        }
    }

    /// Ends a fault, as a person or time would.
    fn repair(&mut self, fault: Fault, victim: usize) {
        let name = NAMES[victim];
        match fault {
            Fault::KillAgent => self.nodes[victim].up(&[]),
            Fault::PowerCut => {
                self.switch.set_cable(name, true).unwrap();
                self.nodes[victim].up(&[]);
            }
            Fault::StopAgent => {
                signal(self.nodes[victim].agent.as_ref().unwrap().0.id() as i32, libc::SIGCONT)
            }
            Fault::Cut => self.switch.set_cable(name, true).unwrap(),
            Fault::DiskFull => {
                self.nodes[victim].machine.run("rm -f /root/fill; mount -o remount,size=1g /root").unwrap();
            }
            Fault::ClockJump => self.nodes[victim].machine.run("rm /root/clock").unwrap(),
            Fault::SlowDisk => self.nodes[victim].machine.run("rm /root/slow").unwrap(),
            Fault::OutOfMemory => {
                processes(&self.nodes[victim], "serve").iter().for_each(|id| limit_memory(*id, false));
            }
            // The agent ends a stopped rank itself.
            Fault::KillRank | Fault::StopRank => {}
        }
    }

    /// Waits until the cluster is whole: members, document, model, and no process too many.
    fn mend(&mut self) {
        let nodes = &self.nodes;
        wait("the cluster is whole", || {
            let healthy = nodes.iter().all(|node| node.cluster(&["health"]).status.success());
            let statuses: Vec<Value> = nodes.iter().filter_map(Node::status).collect();
            healthy
                && statuses.len() == 3
                && statuses.iter().all(|status| status["document"] == statuses[0]["document"])
        });
        let status = nodes[0].status().unwrap();
        assert_eq!(status["members"].as_array().map(Vec::len), Some(3), "a member is lost: {status}");
        assert_eq!(status["models"][0]["name"], "builtin", "the model is lost: {status}");
        // A node that was alone for a while runs the model alone, until it goes back to both.
        wait("no process too many", || {
            let ranks = nodes[0].ready_on().unwrap_or_default();
            let runs = |(index, node): (usize, &Node)| {
                let is_wanted = ranks.iter().any(|name| *name == NAMES[index]);
                processes(node, "serve").len() == usize::from(is_wanted) && processes(node, "up").len() == 1
            };
            ranks.len() == 2 && nodes.iter().enumerate().all(runs)
        });
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random.below(limit as u64) as usize
    }

    /// One fault at one moment.
    fn round(&mut self, fault: Fault, moment: Moment) -> Duration {
        if moment == Moment::Fetch {
            return self.fetch_round(fault);
        }
        let ranks = self.nodes[0].ready_on().unwrap();
        let head = index_of(&ranks[0]);
        // Two of three faults hit the head.
        let victim = if self.below(3) < 2 { head } else { self.below(3) };
        let asked = (victim + 1 + self.below(2)) % 3;
        if moment == Moment::Join {
            // The victim comes back, and is hit once it is in.
            signal(self.nodes[victim].agent.as_ref().unwrap().0.id() as i32, libc::SIGKILL);
            std::thread::sleep(Duration::from_millis(self.random.below(2000)));
            self.nodes[victim].up(&[]);
            wait("the victim answers", || self.nodes[victim].status().is_some());
        }
        if moment == Moment::Load {
            let loaded = self.nodes[asked].model(&["load", "builtin", "--nodes", "2", "--wait", "0"]);
            assert!(loaded.status.success());
            std::thread::sleep(Duration::from_millis(self.random.below(400)));
        }
        let question = usize::from(moment == Moment::Prefill);
        let delay = Duration::from_millis(self.random.below(60));
        let (answer, took) = self.ask(asked, question, |series| {
            if moment == Moment::Drain {
                assert!(series.nodes[asked].cluster(&["drain", NAMES[victim]]).status.success());
            }
            std::thread::sleep(delay);
            series.strike(fault, victim);
        });
        assert_eq!(
            answer, self.questions[question].answer,
            "{fault:?}, {moment:?}: the text without a fault"
        );
        self.repair(fault, victim);
        if moment == Moment::Drain {
            wait("the drained node is heard", || {
                self.nodes[asked].cluster(&["resume", NAMES[victim]]).status.success()
            });
        }
        self.mend();
        took
    }
}

/// `THUNDER_LONG=1` runs 200 of them, `THUNDER_FAULTS` another number. `THUNDER_FAULTS_FIRST`
/// begins later in the series, with another seed.
#[test]
fn no_answer_and_no_state_is_lost_by_random_faults() {
    let has_curl = std::process::Command::new("curl").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !can_make_machines() || !has_curl {
        let why = "it needs root, namespaces and curl";
        thunder_testing::skip("no_answer_and_no_state_is_lost_by_random_faults", why);
        return;
    }
    let asked = std::env::var("THUNDER_FAULTS").ok().and_then(|count| count.parse().ok());
    let rounds = asked.unwrap_or(if thunder_testing::is_long() { 200 } else { 3 });
    let first =
        std::env::var("THUNDER_FAULTS_FIRST").ok().and_then(|number| number.parse().ok()).unwrap_or(0);
    let mut series = Series::new(7 + first as u64);
    let mut times = Vec::new();
    for number in first..first + rounds {
        // Every fault at every moment in turn, the rest at random.
        let fault = FAULTS[(number * 3 + 2) % FAULTS.len()];
        let moment = MOMENTS[(number + number / FAULTS.len()) % MOMENTS.len()];
        let began = Instant::now();
        let took = series.round(fault, moment);
        println!(
            "{number}: {fault:?} during {moment:?}: answered after {:.1} s, whole after {:.1} s",
            took.as_secs_f64(),
            began.elapsed().as_secs_f64()
        );
        times.push(took);
    }
    let usage = [PROGRAM, "usage", "--format", "json"];
    let usage = series.nodes[1].machine.command(&usage).output().unwrap();
    let usage: Value = serde_json::from_slice(&usage.stdout).unwrap();
    let counted = (&usage["total"]["requests"], &usage["total"]["failed"], &usage["missing"]);
    assert_eq!(counted, (&json!(series.answers), &json!(0), &json!([])), "{usage}");
    times.sort();
    println!(
        "{rounds} faults: no answer lost or changed, no process left over, no state and no usage lost; answers took {:.1} s \
         (median), {:.1} s (longest)",
        times[times.len() / 2].as_secs_f64(),
        times[times.len() - 1].as_secs_f64()
    );
}
