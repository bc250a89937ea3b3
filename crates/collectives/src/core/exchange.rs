//! Runs messages to and from any number of peers to their end, and stores what is received or
//! reduces it in place.

use super::Core;
use crate::header::Header;
use crate::reduce::reduce;
use crate::{CommError, DType, Op};

impl Core {
    /// Runs all queued messages to their end.
    ///
    /// # Safety
    /// The pointers of the queued messages must be valid for their lengths until this returns.
    pub async unsafe fn exchange(&mut self) -> Result<(), CommError> {
        loop {
            let sent = self.step_sends()?;
            let received = self.step_receives()?;
            if self.all_messages_done() {
                return Ok(());
            }
            self.pause_unless(sent || received).await?;
        }
    }

    /// Runs all queued messages to their end. Received messages are not stored: they are reduced
    /// into `out`, together with the `length` bytes at `own`. If `own` is also what is being sent,
    /// set `hold_back`: then no byte is overwritten before it has been sent.
    ///
    /// # Safety
    /// `out` and `own` must be valid for `length` bytes (and may be the same), every other rank's
    /// message queued with that length, and the pointers of queued sends valid until this returns.
    pub async unsafe fn exchange_reduce(
        &mut self,
        out: *mut u8,
        own: *const u8,
        length: usize,
        (dtype, op): (DType, Op),
        hold_back: bool,
    ) -> Result<(), CommError> {
        if self.incoming.iter().any(|message| message.active && message.expected.is_inline()) {
            // SAFETY: as promised by the caller.
            return unsafe {
                self.exchange_reduce_inline(out, own, length / dtype.size(), (dtype, op)).await
            };
        }
        let mut done = 0;
        loop {
            let mut moved = self.step_sends()?;
            if done < length {
                let ready = self.ready_to_reduce(done, length, hold_back, &mut moved)?;
                let ready = ready - ready % dtype.size();
                // SAFETY: every view holds `ready` bytes; `out` and `own` hold `length`.
                unsafe { self.reduce_ready(out, own, done, ready, (dtype, op)) };
                done += ready;
                moved |= ready > 0;
            } else {
                moved |= self.step_headers()?;
            }
            if self.all_messages_done() {
                return Ok(());
            }
            self.pause_unless(moved).await?;
        }
    }

    /// Number of bytes from `done` on that every peer has sent and that may be overwritten.
    #[inline]
    fn ready_to_reduce(
        &mut self,
        done: usize,
        length: usize,
        hold_back: bool,
        moved: &mut bool,
    ) -> Result<usize, CommError> {
        let mut ready = length - done;
        if hold_back {
            for message in self.outgoing.iter().filter(|message| message.active) {
                ready = ready.min(message.sent - done);
            }
        }
        for peer in 0..self.size {
            if peer != self.rank && ready > 0 {
                *moved |= self.step_header(peer)?;
                if !self.header_done(peer) {
                    ready = 0;
                } else {
                    ready = ready.min(self.fill_view(peer, ready)?);
                }
            }
        }
        Ok(ready)
    }

    /// Reduces `ready` bytes from `done` on, and consumes them.
    ///
    /// # Safety
    /// Every link's view must hold `ready` bytes, and `out` and `own` `done + ready`.
    #[inline]
    unsafe fn reduce_ready(
        &mut self,
        out: *mut u8,
        own: *const u8,
        done: usize,
        ready: usize,
        (dtype, op): (DType, Op),
    ) {
        if ready == 0 {
            return;
        }
        self.sources.clear();
        for peer in 0..self.size {
            self.sources.push(match &self.links[peer] {
                Some(link) => link.view().as_ptr(),
                // SAFETY: `done` lies within `own`, for which the caller vouches.
                None => unsafe { own.add(done) },
            });
        }
        // SAFETY: as promised by the caller.
        unsafe { reduce(dtype, op, out.add(done), &self.sources, ready / dtype.size()) };
        for (link, message) in self.links.iter_mut().zip(&mut self.incoming) {
            if let Some(link) = link {
                link.consume(ready);
                message.read = done + ready;
            }
        }
    }

    /// Reads the headers of messages whose payload is complete, and ends the messages.
    fn step_headers(&mut self) -> Result<bool, CommError> {
        let mut moved = false;
        for peer in 0..self.size {
            if self.incoming[peer].active {
                moved |= self.step_header(peer)?;
                self.finish_receive(peer);
            }
        }
        Ok(moved)
    }

    /// `exchange_reduce` for messages whose payload is in their headers.
    ///
    /// # Safety
    /// As for `exchange_reduce`.
    async unsafe fn exchange_reduce_inline(
        &mut self,
        out: *mut u8,
        own: *const u8,
        count: usize,
        (dtype, op): (DType, Op),
    ) -> Result<(), CommError> {
        // SAFETY: as promised by the caller.
        unsafe { self.exchange().await? };
        self.sources.clear();
        for (peer, message) in self.incoming.iter().enumerate() {
            let payload = Header::inline(&message.header).as_ptr();
            self.sources.push(if peer == self.rank { own } else { payload });
        }
        // SAFETY: the payloads have arrived completely, and the caller vouches for `out` and `own`.
        unsafe { reduce(dtype, op, out, &self.sources, count) };
        Ok(())
    }
}
