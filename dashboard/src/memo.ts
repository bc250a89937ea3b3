// A component that is rendered again only if its properties have changed.
import { Component, h } from "preact";
import type { ComponentChild, FunctionComponent } from "preact";

export function memo<P extends object>(inner: FunctionComponent<P>): FunctionComponent<P> {
  class Memo extends Component<P> {
    override shouldComponentUpdate(next: P): boolean {
      const now = this.props as Record<string, unknown>;
      return Object.entries(next).some(([name, value]) => name !== "children" && now[name] !== value);
    }
    override render(): ComponentChild {
      return h(inner, this.props as never);
    }
  }
  return Memo as unknown as FunctionComponent<P>;
}
