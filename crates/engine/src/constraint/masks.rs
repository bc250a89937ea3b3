//! Masks of answers that follow a grammar, computed while the ranks compute the next step.
//!
//! A mask takes about 50 µs; with a hostile grammar it may take 20 ms. If an answer's last mask was
//! slow, its next one is computed by a thread that works only a part of the time, and the answer is
//! left out of steps until its mask is ready. So such answers slow down each other, and no other
//! answer.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cpu_time::ThreadTime;
use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;

use super::{Constraint, in_words};
use crate::event::Fault;

/// Threads for answers with fast masks.
const QUICK_THREADS: usize = 2;
/// Masks that take longer are slow. Masks of real schemas take 0.05 to 0.5 ms.
const SLOW: Duration = Duration::from_millis(1);
/// After a slow mask, its thread rests this many times as long as the mask took. Slow masks thus
/// take at most a tenth of a core from the ranks.
const REST: u32 = 9;
/// Maximum total time of an answer's slow masks.
const MOST_SLOW: Duration = Duration::from_secs(2);
/// Maximum wait of a step for a mask on a busy machine.
const MASK_WAIT: Duration = Duration::from_secs(10);

/// A mask to compute, after one more token.
struct Job {
    matcher: Matcher,
    token: Option<u32>,
    reply: SyncSender<Mask>,
}

/// A computed mask.
struct Mask {
    matcher: Matcher,
    /// `None` if the answer must end.
    allowed: Result<Option<SimpleVob>, String>,
    /// Its computation time.
    took: Duration,
}

/// The threads that compute masks. They end with the last handle.
#[derive(Clone)]
pub(super) struct Threads {
    quick: Sender<Job>,
    slow: Sender<Job>,
}

impl Threads {
    pub fn start() -> io::Result<Self> {
        let start = |name: &str, count: usize, rest: u32| {
            let (jobs, receiver) = channel();
            let receiver = Arc::new(Mutex::new(receiver));
            for index in 0..count {
                let receiver = receiver.clone();
                let thread = std::thread::Builder::new().name(format!("{name}-{index}"));
                thread.spawn(move || compute_masks(&receiver, rest))?;
            }
            Ok::<_, io::Error>(jobs)
        };
        Ok(Self { quick: start("masks", QUICK_THREADS, 0)?, slow: start("slow-masks", 1, REST)? })
    }
}

/// Computes masks. After each, rests `rest` times as long as the mask took.
fn compute_masks(jobs: &Mutex<Receiver<Job>>, rest: u32) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Job { mut matcher, token, reply }) = job else { return };
        let began = ThreadTime::now();
        let consumed = token.map_or(Ok(()), |token| matcher.consume_token(token));
        let allowed = consumed
            .and_then(|()| if matcher.is_stopped() { Ok(None) } else { matcher.compute_mask().map(Some) });
        let allowed = allowed.map_err(|error| in_words(&error));
        let took = began.elapsed();
        // The request may have ended meanwhile.
        let _ = reply.send(Mask { matcher, allowed, took });
        if rest > 0 {
            std::thread::sleep(took * rest);
        }
    }
}

/// Why an answer has no next mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MaskFailure {
    pub message: String,
    pub fault: Fault,
}

/// A constraint during one answer.
pub(crate) struct MaskedAnswer {
    eos: Arc<[u32]>,
    threads: Threads,
    coming: Option<Receiver<Mask>>,
    /// A mask that arrived before anybody waited for it.
    ready: Option<Mask>,
    matcher: Option<Matcher>,
    /// The last mask was slow.
    is_slow: bool,
    /// Total time of slow masks.
    slow: Duration,
    /// The answer is complete without an end token.
    is_complete: bool,
    failure: Option<MaskFailure>,
}

impl MaskedAnswer {
    /// Begins an answer, and starts the computation of its first mask.
    pub fn begin(Constraint { matcher, eos, threads }: Constraint) -> Self {
        let mut masked = Self {
            eos,
            threads,
            coming: None,
            ready: None,
            matcher: None,
            is_slow: false,
            slow: Duration::ZERO,
            is_complete: false,
            failure: None,
        };
        masked.request_mask(matcher, None);
        masked
    }

    fn request_mask(&mut self, matcher: Matcher, token: Option<u32>) {
        let (reply, coming) = sync_channel(1);
        let threads = if self.is_slow { &self.threads.slow } else { &self.threads.quick };
        // If the threads are gone, waiting for the mask reports this.
        let _ = threads.send(Job { matcher, token, reply });
        self.coming = Some(coming);
    }

    /// True if the last mask took long.
    pub fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// True if the next mask is slow and not ready: a step with the answer would wait.
    pub fn is_late(&mut self) -> bool {
        self.is_slow
            && self.ready.is_none()
            && self.coming.as_ref().is_some_and(|coming| match coming.try_recv() {
                Ok(mask) => {
                    self.ready = Some(mask);
                    false
                }
                Err(error) => error == TryRecvError::Empty,
            })
    }

    /// Waits up to `limit` for the next mask.
    pub fn wait(&mut self, limit: Duration) {
        if self.ready.is_none()
            && let Some(coming) = &self.coming
        {
            self.ready = coming.recv_timeout(limit).ok();
        }
    }

    fn fail(&mut self, fault: Fault, message: String) -> Option<()> {
        self.failure = Some(MaskFailure { message, fault });
        None
    }

    /// Waits for the next mask, and writes a bit for each token that may follow. `None` after a
    /// failure.
    pub fn allow(&mut self, allowed: &mut Vec<u32>) -> Option<()> {
        let coming = self.coming.take()?;
        let ready = self.ready.take().map(Ok);
        let mask = match ready.unwrap_or_else(|| coming.recv_timeout(MASK_WAIT)) {
            Ok(mask) => mask,
            Err(RecvTimeoutError::Timeout) => {
                let message = format!(
                    "the answer's grammar gave no mask within {MASK_WAIT:?}: the machine is too busy"
                );
                return self.fail(Fault::Engine, message);
            }
            Err(RecvTimeoutError::Disconnected) => {
                let message = "the thread of the answer's grammar has ended: see the log".to_owned();
                return self.fail(Fault::Engine, message);
            }
        };
        let Mask { matcher, allowed: found, took } = mask;
        self.matcher = Some(matcher);
        self.is_slow = took > SLOW;
        self.slow += if self.is_slow { took } else { Duration::ZERO };
        if self.slow > MOST_SLOW {
            let message = format!(
                "the answer's grammar takes too long: finding the tokens that may follow took {MOST_SLOW:?}. Make \
                 its regular expressions and repetitions smaller"
            );
            return self.fail(Fault::Request, message);
        }
        match found {
            Ok(Some(mask)) => {
                allowed.extend_from_slice(mask.as_slice());
                Some(())
            }
            Ok(None) => {
                self.is_complete = true;
                let end = self.eos.first().copied().unwrap_or(0);
                allowed.resize((end / u32::BITS) as usize + 1, 0);
                allowed[(end / u32::BITS) as usize] = 1 << (end % u32::BITS);
                Some(())
            }
            Err(why) => self.fail(Fault::Request, format!("the answer cannot go on by its grammar: {why}")),
        }
    }

    /// Adds the chosen token. Returns true if the answer ends with it; the token is then not part
    /// of the answer.
    pub fn accept(&mut self, token: u32) -> bool {
        if self.is_complete || self.eos.contains(&token) {
            return true;
        }
        if let Some(matcher) = self.matcher.take() {
            self.request_mask(matcher, Some(token));
        }
        false
    }

    /// Why the answer cannot continue.
    pub fn failure(&self) -> Option<&MaskFailure> {
        self.failure.as_ref()
    }
}
