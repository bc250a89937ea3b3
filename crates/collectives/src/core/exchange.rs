//! Messages to and from any number of peers, run to their end: stored, or reduced where they lie.

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
            if self.idle_messages() {
                return Ok(());
            }
            self.turn(sent || received).await?;
        }
    }

    /// Runs all queued messages to their end, where those received are not stored but reduced, together with the
    /// `length` bytes at `own`, into `out`. When `own` is also what is being sent, `hold_back` keeps the result from
    /// overwriting what has not been sent.
    ///
    /// # Safety
    /// `out` and `own` must be valid for `length` bytes (and may be the same), every other rank's message queued with
    /// that length, and the pointers of queued sends valid until this returns.
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
                let mut ready = length - done;
                if hold_back {
                    for message in self.outgoing.iter().filter(|message| message.active) {
                        ready = ready.min(message.sent - done);
                    }
                }
                for peer in 0..self.size {
                    if peer != self.rank && ready > 0 {
                        moved |= self.step_header(peer)?;
                        if !self.header_done(peer) {
                            ready = 0;
                        } else {
                            ready = ready.min(self.arrived(peer, ready)?);
                        }
                    }
                }
                ready -= ready % dtype.size();
                if ready > 0 {
                    self.sources.clear();
                    for peer in 0..self.size {
                        self.sources.push(match &self.links[peer] {
                            Some(link) => link.view().as_ptr(),
                            // SAFETY: `done < length`, for which the caller vouches.
                            None => unsafe { own.add(done) },
                        });
                    }
                    // SAFETY: each view holds at least `ready` bytes; `out` and `own` hold `length`.
                    unsafe { reduce(dtype, op, out.add(done), &self.sources, ready / dtype.size()) };
                    done += ready;
                    for (link, message) in self.links.iter_mut().zip(&mut self.incoming) {
                        if let Some(link) = link {
                            link.consume(ready);
                            message.read = done;
                        }
                    }
                    moved = true;
                }
            } else {
                for peer in 0..self.size {
                    if self.incoming[peer].active {
                        moved |= self.step_header(peer)?;
                        self.finish_receive(peer);
                    }
                }
            }
            if self.idle_messages() {
                return Ok(());
            }
            self.turn(moved).await?;
        }
    }

    /// `exchange_reduce` of messages that are in their headers.
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
        // SAFETY: the payloads are whole, and the caller vouches for `out` and `own`.
        unsafe { reduce(dtype, op, out, &self.sources, count) };
        Ok(())
    }
}
