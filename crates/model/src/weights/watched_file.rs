//! Mapped files that another program may truncate: reading a missing page raises SIGBUS. The
//! handler reports the file before the process ends; reading has no additional cost.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// Maximum files that can be named, over all open models. The largest models have a few hundred.
const MOST_FILES: usize = 1024;

/// A watched mapping. Empty if `end` is 0.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    message: AtomicPtr<u8>,
    message_bytes: AtomicUsize,
}

static SLOTS: [Slot; MOST_FILES] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        message: AtomicPtr::new(std::ptr::null_mut()),
        message_bytes: AtomicUsize::new(0),
    }
}; MOST_FILES];

/// Keeps a mapping in the list of those that the handler can name. Must be dropped before the
/// mapping.
#[derive(Debug)]
pub(super) struct WatchedFile {
    slot: Option<usize>,
    /// The handler reads it while the slot is in use.
    _message: Box<[u8]>,
}

impl WatchedFile {
    pub fn new(map: &[u8], path: &Path) -> Self {
        static HANDLER: OnceLock<()> = OnceLock::new();
        HANDLER.get_or_init(install);
        let message = format!(
            "\nerror: {}: the file became shorter, or its disk failed, while it was read: do not change a model's files \
             while they are in use; if it is incomplete, download it again\n",
            path.display()
        );
        let message = message.into_bytes().into_boxed_slice();
        let start = map.as_ptr() as usize;
        // A slot is claimed by setting its start; the handler checks it once it has an end.
        let slot = SLOTS.iter().position(|slot| {
            slot.start.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        if let Some(slot) = slot.map(|index| &SLOTS[index]) {
            slot.message.store(message.as_ptr().cast_mut(), Ordering::Relaxed);
            slot.message_bytes.store(message.len(), Ordering::Relaxed);
            slot.end.store(start + map.len(), Ordering::Release);
        }
        Self { slot, _message: message }
    }
}

impl Drop for WatchedFile {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.map(|index| &SLOTS[index]) {
            slot.end.store(0, Ordering::Release);
            slot.start.store(0, Ordering::Release);
        }
    }
}

static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn install() {
    // SAFETY: both structures are valid for the call, an all-zero one included. The handler only
    // does what signal handlers may.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut previous: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        // Asked for first: the handler needs it from its first moment on.
        libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut previous);
        let _ = PREVIOUS.set(previous);
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}

extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the system passes a valid structure, which has the address for this signal.
    let address = unsafe { (*info).si_addr() } as usize;
    let hit = SLOTS.iter().find(|slot| {
        let end = slot.end.load(Ordering::Acquire);
        (slot.start.load(Ordering::Relaxed)..end).contains(&address)
    });
    // SAFETY: `write`, `_exit` and `sigaction` may be called in a signal handler. A slot's message
    // lives as long as its mapping, which is being read.
    unsafe {
        if let Some(slot) = hit {
            let message = slot.message.load(Ordering::Relaxed);
            libc::write(libc::STDERR_FILENO, message.cast(), slot.message_bytes.load(Ordering::Relaxed));
            libc::_exit(1);
        }
        // Not a watched file: the same access raises the signal again, for the previous handler.
        let previous = PREVIOUS.get().map_or(std::ptr::null(), std::ptr::from_ref);
        libc::sigaction(signal, previous, std::ptr::null_mut());
    }
}
