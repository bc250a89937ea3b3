//! Ctrl-C and TERM. A command may handle the next one as a request to end. Any other one ends the
//! process at once, together with the ranks that it started.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use anyhow::Context;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGINT, SIGTERM};
use thunder_cluster::local::RankKiller;

/// Handles a signal by its number; false if the signal must end the process.
type Action = Box<dyn FnOnce(i32) -> bool + Send>;

struct State {
    on_next: Option<Action>,
    ranks: Option<RankKiller>,
    /// The terminal's mode at the start: a line editor may have changed it.
    terminal: Option<Termios>,
}

static STATE: Mutex<State> = Mutex::new(State { on_next: None, ranks: None, terminal: None });

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Handles Ctrl-C and TERM from now on. Further calls change nothing.
///
/// # Errors
/// When the system refuses.
pub fn catch() -> anyhow::Result<()> {
    static ONCE: Once = Once::new();
    let mut caught = Ok(());
    ONCE.call_once(|| caught = start());
    caught.context("cannot catch Ctrl-C")
}

fn start() -> std::io::Result<()> {
    state().terminal = tcgetattr(std::io::stdin()).ok();
    let (mut wake, writer) = UnixStream::pair()?;
    let mut flags = Vec::new();
    for signal in [SIGINT, SIGTERM] {
        let flag = Arc::new(AtomicBool::new(false));
        // Before the pipe, so that a woken thread finds the flag set.
        signal_hook::flag::register(signal, flag.clone())?;
        signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
        flags.push((signal, flag));
    }
    let listen = move || {
        let mut byte = [0];
        while matches!(wake.read(&mut byte), Ok(1)) {
            let came = flags.iter().filter(|(_, flag)| flag.swap(false, Ordering::AcqRel));
            came.for_each(|(signal, _)| handle(*signal));
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(listen)?;
    Ok(())
}

fn handle(signal: i32) {
    let action = state().on_next.take();
    if !action.is_some_and(|act| act(signal)) {
        end(signal);
    }
}

/// Kills the ranks that this process started, and ends it as the signal does by default.
pub fn end(signal: i32) -> ! {
    let state = state();
    if let Some(ranks) = &state.ranks {
        ranks.kill();
    }
    if let Some(mode) = &state.terminal {
        // Fails if the terminal is gone.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, mode);
    }
    let _ = signal_hook::low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal)
}

/// The next signal calls `act` instead of ending the process, until this is dropped.
#[must_use]
pub struct Asked(());

/// Handles the next signal as a request. `act` returns false if that signal must end the process.
pub fn on_next(act: impl FnOnce(i32) -> bool + Send + 'static) -> Asked {
    state().on_next = Some(Box::new(act));
    Asked(())
}

impl Drop for Asked {
    fn drop(&mut self) {
        state().on_next = None;
    }
}

/// A signal that ends the process kills these ranks too, until this is dropped.
#[must_use]
pub struct Ending(());

/// Kills `ranks` when a signal ends the process.
pub fn end_too(ranks: RankKiller) -> Ending {
    state().ranks = Some(ranks);
    Ending(())
}

impl Drop for Ending {
    fn drop(&mut self) {
        state().ranks = None;
    }
}
